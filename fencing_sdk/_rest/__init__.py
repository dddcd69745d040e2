"""
HTTP and JSON to a cluster of nodes: what the backends and guards of such stores share.

    pool.py        connections that belong to one event loop and one process
    endpoints.py   where the nodes are, and which of them is asked first
    tls.py         how certificates are checked
    numbers.py     options that are numbers
    flights.py     one call that serves all who want the same at the same time
    doubts.py      claims with a request that has no answer
    words.py       requests and answers of etcd, in JSON
    login.py       who asks etcd
    answers.py     what an answer of a member of etcd means
    opening.py     from a URL and options to a gateway
    gateway.py     one request to etcd, whichever member answers it

Below the backends and the guards, which both may import from here; it knows neither.
"""
