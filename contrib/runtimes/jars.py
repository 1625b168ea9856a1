#!/usr/bin/env python3
"""Prints the class path of Netty for NettyGet.java. Jars that target/netty lacks are fetched from Maven Central.

    java -cp "$(contrib/runtimes/jars.py)" contrib/runtimes/NettyGet.java http://127.0.0.1:8080/ 5 option
"""

from __future__ import annotations

import hashlib
import pathlib
import platform
import urllib.request

REPOSITORY = "https://repo1.maven.org/maven2/io/netty"
DIRECTORY = pathlib.Path(__file__).resolve().parents[2] / "target/netty"

VERSION = "4.1.118.Final"
# The SHA-256 of each jar, by artifact and classifier. A classifier is an architecture with its native library.
JARS = {
    ("netty-buffer", ""): "0eea4e8666a9636a28722661d8ba5fa8564477e75fec6dd2ff3e324e361f8b3c",
    ("netty-common", ""): "65cce901ecf0f9d6591cc7750772614ab401a84415dc9aec9da4d046f0f9a77c",
    ("netty-resolver", ""): "3170c225972c18b6850d28add60db15bb28d83c4e3d5b686ca220e0bd7273c8a",
    ("netty-transport", ""): "ab3751e717daef9c8d91e4d74728a48730bd8530b72e2466b222b2ea3fb07db9",
    ("netty-transport-classes-epoll", ""): "bd86e6d41e1f6053f9577931655236259778ab045646e1e6ab04150f070864f3",
    ("netty-transport-native-unix-common", ""): "69b16793d7b41ea76a762bd2bd144fc4f7c39c156a7a59ebf69baeb560fb10b7",
    ("netty-transport-native-epoll", "x86_64"): "c95f66b9ab3f7fb6e666a81a5d0120e0c6acddf8fdf440e2ba212bfaf76a7c73",
    ("netty-transport-native-epoll", "aarch_64"): "53b3bec1d019bd3db6eeed30c6a770b49052ddd8fa1566796ae759e62b572425",
}


def fetch(artifact: str, classifier: str, sha256: str) -> str:
    """Returns the path of a jar, which is fetched unless it is there."""
    name = f"{artifact}-{VERSION}{classifier and f'-linux-{classifier}'}.jar"
    path = DIRECTORY / name
    # A fetch that was interrupted leaves a part.
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        try:
            with urllib.request.urlopen(f"{REPOSITORY}/{artifact}/{VERSION}/{name}", timeout=60) as response:
                body = response.read()
        except OSError as error:
            raise SystemExit(f"jars.py: fetch {name}: {error}; run it where Maven Central can be reached") from None
        if (found := hashlib.sha256(body).hexdigest()) != sha256:
            raise SystemExit(f"jars.py: fetch {name}: its SHA-256 is {found}, not {sha256}")
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return str(path)


def class_path() -> str:
    """Returns the jars for this machine."""
    machine = platform.machine().replace("aarch64", "aarch_64")
    return ":".join(fetch(*jar, sha256) for jar, sha256 in JARS.items() if jar[1] in ("", machine))


if __name__ == "__main__":
    print(class_path())
