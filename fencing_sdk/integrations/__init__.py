"""
A module for each web framework, HTTP client, message system or system of telemetry. Each imports its own framework.

    aiohttp     client middleware that sends the token; server middleware that guards; raise_for_stale
    clients     a request hook for httpx and httpx2, an adapter for requests; raise_for_stale
    wsgi        a middleware that guards, for every WSGI framework
    django      a middleware that guards; a field for rows that keep their fence
    asgi        a middleware that guards, for every ASGI framework; a lifespan
    fastapi     dependencies: the token of a request, admitted or presented; a lease
    messages    the token in gRPC metadata and in the headers of messages
    logs        an observer that logs every event, its fields in ``extra``
    prometheus, opentelemetry
                observers that keep metrics and make spans

    _incoming   resource's side: which token a request carries, and which resource it means
    _measures   the instruments, for every library of metrics
    _problem    the body of a refusal, as both sides read and write it: RFC 9457

The two sides share `_problem` and the wire format alone.
"""
