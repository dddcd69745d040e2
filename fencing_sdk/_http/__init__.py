"""
What stores and guards that speak HTTP share.

    endpoints   the nodes of a cluster, and the order in which to ask them
    node_race   one call to a cluster, whichever node answers it
    tls         how certificates are checked
    pool        the connections of one event loop and process, and the options that are numbers
    outcomes    JSON that is sent, answers that are read to a limit, and when the outcome of a request is unknown
"""
