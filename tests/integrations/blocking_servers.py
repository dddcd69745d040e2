"""Waitress in a thread of its own, and Django in front of it or behind."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import django_settings  # noqa: F401  (it configures Django)
import waitress
from django.core.handlers.wsgi import WSGIHandler
from django.test import override_settings


@contextlib.asynccontextmanager
async def waitress_server(app: Callable[..., Any]) -> AsyncIterator[str]:
    """Serve *app* until the body ends; yields its URL."""
    sockets: dict[int, Any] = {}
    server = waitress.create_server(
        app, host="127.0.0.1", port=0, threads=4, map=sockets, clear_untrusted_proxy_headers=True
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()

    def end() -> None:
        """Close all, in the thread of the server, whose loop ends with its last socket."""
        for one in list(sockets.values()):
            one.close()

    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.trigger.pull_trigger(end)
        await asyncio.to_thread(thread.join, 20)
        await asyncio.to_thread(server.task_dispatcher.shutdown)


@contextlib.asynccontextmanager
async def django_server(urls: list[Any], middleware: Callable[..., Any]) -> AsyncIterator[str]:
    """Serve views of Django behind *middleware*, which its settings name by a path."""
    module = types.ModuleType("urls_of_a_test")
    module.urlpatterns = urls
    module.middleware = middleware
    sys.modules[module.__name__] = module
    with override_settings(ROOT_URLCONF=module.__name__, MIDDLEWARE=[f"{module.__name__}.middleware"]):
        async with waitress_server(WSGIHandler()) as url:
            yield url
