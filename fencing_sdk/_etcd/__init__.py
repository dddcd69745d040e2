"""
etcd's JSON gateway, for the backend and the guard.

    options       from a URL and options to a gateway
    gateway       one request, whichever member answers it; streams
    streams       the body of a stream, and its answers
    login         the token of a user
    answers       one answer is read
    errors        which error of the contract a failure becomes
    json_codec    what is inside requests and answers
"""
