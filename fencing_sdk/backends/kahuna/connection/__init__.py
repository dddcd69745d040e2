"""From a request to an answer: `cluster` asks node after node, and `node` sends one request to one node."""
