"""Flask, whose errors of a handler never reach what wraps it: an error handler answers them."""

import pytest
from flask import Flask, request

from fencing_sdk import ConfigurationError, FencingError, StaleTokenError
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations.wsgi import GuardedApplication, problem_of, request_token
from fencing_sdk.sync import connect

EARLY, LATE = {"Fencing-Token": "34"}, {"Fencing-Token": "35"}


def service(guard, in_front, *, checks=True):
    """*checks*: whether the handler admits the token, too."""
    app, seats = Flask("seats"), {}

    @app.put("/seats/<seat>")
    def book(seat):
        if checks:
            guard.write(f"seats/{seat}", request_token(request.environ), seats.__setitem__, seat, request.args["who"])
        else:
            seats[seat] = request.args["who"]
        return "booked"

    @app.errorhandler(FencingError)
    def answer(error):
        problem = problem_of(error, request.headers)
        return problem.body, problem.status, problem.headers

    options = {"guard": guard, "resource": "seats/{seat}", "locks": connect("memory://")} if in_front else {}
    app.wsgi_app = GuardedApplication(app.wsgi_app, **options)
    return app.test_client(), seats


@pytest.mark.parametrize("in_front", [True, False])
def test_a_stale_token_is_409_in_front_of_the_handler_and_in_it(in_front):
    client, seats = service(MemoryGuard(), in_front)
    assert client.put("/seats/42?who=Bob", headers=LATE).status_code == 200
    refused = client.put("/seats/42?who=Ada", headers=EARLY)
    assert (refused.status_code, refused.json["fence"], refused.mimetype) == (409, 35, "application/problem+json")
    assert client.put("/seats/42?who=Eve").status_code == 428
    assert seats == {"42": "Bob"}


@pytest.mark.parametrize("method", ["put", "Put"])
def test_flask_does_not_let_a_method_in_lower_case_around_the_guard(method):
    """Werkzeug takes it for the method in upper case, and runs the handler."""
    guard = MemoryGuard()
    client, seats = service(guard, in_front=True, checks=False)
    assert client.put("/seats/42?who=Bob", headers=LATE).status_code == 200
    raw = {"REQUEST_METHOD": method}
    assert client.put("/seats/42?who=Ada", headers=EARLY, environ_overrides=raw).status_code == 409
    assert client.put("/seats/42?who=Eve", environ_overrides=raw).status_code == 428
    assert client.put("/seats/42?who=Cem", headers={"Fencing-Token": "36"}, environ_overrides=raw).status_code == 200
    assert seats == {"42": "Cem"}


def test_a_guard_in_front_needs_a_client_and_an_answer_an_error_that_has_one():
    with pytest.raises(ConfigurationError, match="locks must be a client"):
        GuardedApplication(Flask("seats").wsgi_app, MemoryGuard(), resource="seats/{seat}")
    with pytest.raises(ConfigurationError, match="stale_status"):
        problem_of(StaleTokenError("seats/42", 34, 35), [("Fencing-Token", "34")], stale_status=410)


@pytest.mark.parametrize("headers", [[], [("Fencing-Token", "7")], [("Fencing-To\u212aen", "34")]])
def test_a_stale_token_that_the_request_does_not_carry_stays_an_error(headers):
    """The last name has the sign of the Kelvin, which is a "k" in lower case."""
    mine = StaleTokenError("elsewhere", 34, 35)
    with pytest.raises(StaleTokenError) as raised:
        problem_of(mine, headers)
    assert raised.value is mine
