"""Certificates for one test run, made by the openssl command: an authority, a server and a client that it signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files."""

    authority: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path

    def settings(self) -> dict[str, str]:
        """The server's side, in the words of ``redis.conf``."""
        return {
            "tls_ca_cert_file": str(self.authority),
            "tls_cert_file": str(self.certificate),
            "tls_key_file": str(self.key),
        }


def make_certificates(folder: Path) -> Certificates:
    """Make them in *folder*, valid for ``localhost`` and 127.0.0.1."""
    authority, authority_key = _make(folder, "authority", "-x509", "-addext", "keyUsage=critical,keyCertSign")
    signed = ("-x509", "-CA", str(authority), "-CAkey", str(authority_key), "-addext", "basicConstraints=CA:FALSE")
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    certificate, key = _make(folder, "server", *signed, *names)
    client_certificate, client_key = _make(folder, "client", *signed)
    return Certificates(authority, certificate, key, client_certificate, client_key)


def _make(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    request = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    output = ["-subj", f"/CN=fencing test {name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*request, *output, *options], check=True, capture_output=True)
    return certificate, key
