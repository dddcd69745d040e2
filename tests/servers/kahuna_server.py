"""
A stand-in for a Kahuna cluster, because a real one needs .NET; it contains no Kahuna code.

`KahunaServer` is the stand-in as the tests see it: a process of its own (`kahuna_process`), with several nodes over
one store (`kahuna_store`), which answers to the letter what a real one has answered (`kahuna_wire`, and the recordings
in `kahuna_recordings`), and has a real one's troubles and others (`kahuna_faults`). With ``upstreams`` it stands in
front of a real cluster, and the very same tests run against that.

    python -m tests.servers.kahuna_server --ports 2070,2072,2074

starts one for other programs, and prints its URLs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parent))  # the tests are not a package

from kahuna_process import READY, Settings
from local_ports import HOST, free_port

__all__ = ["HOST", "UPSTREAMS", "KahunaServer"]

UPSTREAMS = [url.strip().rstrip("/") for url in os.environ.get("FENCING_TEST_KAHUNA_URL", "").split(",") if url.strip()]
"""The nodes of a real Kahuna, if the tests are to run against one."""
_PROCESS = Path(__file__).with_name("kahuna_process.py")


class KahunaServer:
    """The process, as the tests see it."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 1,
        ports: Sequence[int] = (),
        upstreams: Sequence[str] = (),
        certificate: str = "",
        key: str = "",
    ) -> None:
        chosen = [*(ports or [free_port() for _ in range(nodes)]), free_port()]
        self.settings = Settings(chosen, str(folder / "journal"), certificate, key, list(upstreams))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def ports(self) -> list[int]:
        """Those of the nodes."""
        return self.settings.ports[:-1]

    @property
    def url(self) -> str:
        scheme = "kahuna+https" if self.settings.certificate else "kahuna"
        return f"{scheme}://{','.join(f'{HOST}:{port}' for port in self.ports)}"

    @property
    def origins(self) -> list[str]:
        """For a client that speaks HTTP itself."""
        return [f"http://{HOST}:{port}" for port in self.ports]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, or start again with what was persistent."""
        command = [sys.executable, str(_PROCESS), json.dumps(asdict(self.settings))]
        process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == READY, "the stand-in did not start"

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def pause(self) -> None:
        """Stop it in the middle of whatever it does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def reset(self) -> None:
        """Forget locks, faults and requests; start what is not running."""
        if not self.running:
            self.start()
        self.settings.prefix = f"test/{uuid.uuid4().hex}/"
        self._order("reset", prefix=self.settings.prefix)

    def fault(self, act: str, value: object = "", **details: Any) -> None:
        """See `Fault`. A *value* that is no text becomes JSON."""
        self._order("fault", act=act, value=value if isinstance(value, str) else json.dumps(value), **details)

    def heal(self) -> None:
        """No more faults."""
        self._order("heal")

    def chaos(self, probability: float, *, spared: str = "") -> None:
        """Let a part of all requests, but those for the lock *spared*, meet any of `MISHAPS`."""
        self._order("chaos", probability=probability, spared=spared)

    def replication(self, seconds: float) -> None:
        """How long a change takes, during which the lock is not answered for."""
        self._order("habits", replication=seconds)

    def habits(self, **habits: float) -> None:
        """See `kahuna_store.Habits`."""
        self._order("habits", **habits)

    # Nodes in trouble: see `kahuna_members`.

    def down(self, node: int) -> None:
        """Kill one node: it refuses connections."""
        self._order("down", node=node)

    def up(self, node: int, *, settle: float = 0.0) -> None:
        """Start it again; for *settle* seconds it answers everything with 101."""
        self._order("up", node=node, settle=settle)

    def stop(self, node: int) -> None:
        self._order("stop", number=node)

    def go_on(self, node: int) -> None:
        self._order("go_on", number=node)

    def cut(self, node: int) -> None:
        self._order("cut", number=node)

    def join(self, node: int) -> None:
        self._order("join", number=node)

    def stick(self, node: int) -> None:
        self._order("stick", number=node)

    def cluster(self, **settings: Any) -> None:
        """Set ``failover``, ``replication_factor`` or ``routes`` of `kahuna_members.Members`."""
        self._order("cluster", **settings)

    def seen(self, call: str | None = None) -> list[dict[str, Any]]:
        """The requests that arrived since the reset: their fields, call, node, and port of the client."""
        return [request for request in self._order("seen") if call in {None, request["call"]}]

    def _order(self, order: str, /, **details: Any) -> Any:
        connection = http.client.HTTPConnection(HOST, self.settings.ports[-1], timeout=20)
        try:
            connection.request("POST", f"/stand-in/{order}", json.dumps(details), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, body
            return json.loads(body)
        finally:
            connection.close()


def main() -> None:
    """Run until the input ends or the program is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers.kahuna_server")
    parser.add_argument("--ports", default="2070,2072,2074", help="one for each node")
    ports = [int(port) for port in parser.parse_args().ports.split(",")]
    with tempfile.TemporaryDirectory() as folder, KahunaServer(Path(folder), ports=ports) as server:
        sys.stdout.write(",".join(server.origins) + "\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
