"""
etcd's JSON gateway, for the backend and the guard.

    gateway       from a URL and options to a gateway; one request, whichever member answers it; logins
    streams       the body of a stream, and its answers
    messages      what is inside requests and answers, and which error of the contract a failure becomes
"""
