"""Addresses of pools as they are written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpbus.errors import UsageError
from warpbus.pool.protocol.address import Address, address, is_loopback


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("warpbus://localhost", Address("plain", "localhost", 7700)),
        ("warpbus://127.0.0.1:7701/", Address("plain", "127.0.0.1", 7701)),
        ("warpbus://[::1]", Address("plain", "::1", 7700)),
        ("warpbus://[::1]:80", Address("plain", "::1", 80)),
        ("warpbuss://gpu-host.example", Address("tls", "gpu-host.example", 7700)),
        ("WARPBUSS://GPU-Host:1", Address("tls", "gpu-host", 1)),
        ("warpbuss://[2001:db8::7]:7702", Address("tls", "2001:db8::7", 7702)),
        ("warpbuss://10.0.0.7?ca=/etc/pool/ca.pem", Address("tls", "10.0.0.7", 7700, ca=Path("/etc/pool/ca.pem"))),
        ("warpbuss://h:1/?ca=my%20ca.pem", Address("tls", "h", 1, ca=Path("my ca.pem"))),
        ("warpbus+unix:///run/warpbus/pool", Address("unix", path="/run/warpbus/pool")),
        ("warpbus+unix:///run/a%20b", Address("unix", path="/run/a b")),
    ],
)
def test_addresses_are_read(text, expected):
    assert address(text) == expected
    assert address(str(expected)) == expected


HOSTS = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z]{2,5}){0,2}", fullmatch=True),
    st.ip_addresses().map(str),
)
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
CA = PATHS.filter(lambda text: not text.startswith("~")).map(Path)


@given(HOSTS, st.integers(1, 65535), st.none() | CA)
def test_addresses_come_back(host, port, ca):
    wanted = Address("tls", host, port, ca=ca)
    assert address(str(wanted)) == wanted


@given(PATHS)
def test_paths_come_back(path):
    assert address(str(Address("unix", path=f"/{path.lstrip('/')}"))).path == f"/{path.lstrip('/')}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no address of a pool; give warpbus://"),
        ("gpu-host:7700", "no address of a pool"),
        ("http://gpu-host", "no address of a pool"),
        ("warpbus://", "no host and port"),
        ("warpbus://:7700", "no host and port"),
        ("warpbus://localhost:0", "no host and port"),
        ("warpbus://localhost:65536", "out of range"),
        ("warpbus://localhost:x", "no address of a pool"),
        ("warpbus://[::1", "no address of a pool"),
        ("warpbus://localhost/path", "no host and port"),
        ("warpbuss://a b", "no host and port"),
        ("warpbuss://a\0b", "no host and port"),
        ("warpbuss://user:secret@host", "no user"),
        ("warpbuss://host#x", "no fragment"),
        ("warpbuss://host?plaintext=1", "no such option"),
        ("warpbuss://host?ca=", "no such option"),
        ("warpbuss://host?ca=a&ca=b", "no such option"),
        ("warpbus://localhost?ca=a", "no such option"),
        ("warpbus://gpu-host:7700", "give warpbuss://gpu-host:7700 and start the pool there with a certificate"),
        ("warpbus://10.0.0.1", "are encrypted"),
        ("warpbus://[::ffff:10.0.0.1]", "are encrypted"),
        ("warpbus://localhost.example.com", "are encrypted"),
        ("warpbus+unix://run/pool", "no path of a Unix socket"),
        ("warpbus+unix://", "no path of a Unix socket"),
        ("warpbus+unix:///a?ca=b", "no path of a Unix socket"),
        ("warpbus+unix:///" + "a" * 107, "at most 107 bytes"),
        ("warpbus+unix:///a%00b", "at most 107 bytes"),
    ],
)
def test_what_is_no_address_is_reported(text, message):
    with pytest.raises(UsageError) as caught:
        address(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40).map(lambda text: f"warpbuss://{text}") | st.text(max_size=40))
def test_any_text_is_an_address_or_refused(text):
    try:
        found = address(text)
    except UsageError:
        return
    assert address(str(found)) == found


def test_loopback():
    for host in ("localhost", "LOCALHOST.", "127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "127.0.0.1.example.com", "localhost.example"):
        assert not is_loopback(host)
