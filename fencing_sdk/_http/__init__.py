"""
What stores and guards that speak HTTP share.

    endpoints   the nodes of a cluster, and which of them is asked first
    node_race   one call to a cluster, whichever node answers it
    options     the options that are numbers
    tls         how certificates are checked
    pool        the connections of one event loop and process
    bodies      JSON that is sent, and answers that are read to a limit
    outcomes    when the outcome of a request is unknown
"""
