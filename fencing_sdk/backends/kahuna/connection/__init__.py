"""From a request to an answer: `cluster` asks node after node."""
