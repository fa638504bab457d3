"""Loading images by URL: from allowed hosts and public addresses only, within limits, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.configs.config import Config, ModelConfig
from quire.configs.serving import MediaConfig
from quire.server.errors import NotInstalled
from quire.server.media.inputs import MediaInput
from quire.server.media.loading.addresses import is_public
from quire.server.media.loading.fetch import MAX_REDIRECTS, MAX_URL, Fetcher, Refused
from quire.server.media.service import Images
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.server.asking import CHAT, is_error
from tests.helpers.server.running import RunningServer
from tests.server.media.conftest import NUM_TOKENS, asks, picture

PUBLIC, OTHER = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.3.4",
    "192.168.1.1",
    "169.254.169.254",  # where clouds keep credentials
    "100.64.0.1",
    "192.0.0.8",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12:3456::1",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
    "64:ff9b:1::a00:1",
    "2002:7f00:1::",  # 6to4
    "2002:a9fe:a9fe::1",
    "not an address",
    "",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, OTHER, "8.8.8.8", "64:ff9b::808:808", "2a00:1450:4001::1"])
def test_public_addresses(address):
    assert is_public(address)


@given(st.ip_addresses())
def test_no_address_of_a_private_network_is_public(address):
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast:
        assert not is_public(str(address))


# ---- a server of this machine, which stands for one of the internet


class Site:
    """Answers GET with what `pages` has for the path: bytes of a whole answer, or a function that writes one."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | Callable[[asyncio.StreamWriter], Any]] = {}
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            page = self.pages.get(head.split(b" ")[1].decode(), answer(b"", 404))
            if callable(page):
                await page(writer)
            else:
                writer.write(page)
                await writer.drain()
        writer.close()


def answer(body: bytes, status: int = 200, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (*headers, f"Content-Length: {len(body)}"))
    return f"HTTP/1.1 {status} X\r\nConnection: close\r\n{head}\r\n".encode() + body


def to(location: str, status: int = 302) -> bytes:
    return answer(b"", status, f"Location: {location}")


@contextlib.asynccontextmanager
async def site() -> AsyncIterator[tuple[Site, int]]:
    served = Site()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    async with server:
        yield served, server.sockets[0].getsockname()[1]


class Names:
    """A resolver; `addresses` has the answers for each host, one per question, the last one for ever."""

    def __init__(self, **addresses: list[list[str]]):
        self.addresses, self.questions = addresses, []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.questions.append(host)
        answers = self.addresses[host.partition(".")[0]]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def fetcher(
    names: Names,
    domains: tuple[str, ...] = ("*",),
    max_bytes: int = 10_000,
    timeout: float = 5.0,
    permits: Callable[[str], bool] = is_public,
) -> Fetcher:
    return Fetcher(domains, max_bytes, timeout, names, permits)


def run(pages: dict[str, Any], url: str, **options: Any) -> tuple[bytes | str, Site, Names]:
    """What the URL, with its port filled in, gives: the body, or why it is refused. Hosts resolve to the site, except
    those of `names`.
    """

    async def main() -> tuple[bytes | str, Site, Names]:
        async with site() as (served, port):
            served.pages = {
                path: page.replace(b"PORT", str(port).encode()) if isinstance(page, bytes) else page
                for path, page in pages.items()
            }
            names = options.pop("names", None) or Names(a=[["127.0.0.1"]], b=[["127.0.0.1"]])
            loader = fetcher(names, **{"permits": lambda address: address == "127.0.0.1"} | options)
            try:
                return await loader.fetch(url.replace("PORT", str(port))), served, names
            except Refused as error:
                return str(error), served, names

    return asyncio.run(main())


def test_an_image():
    found, served, names = run({"/x%20y?k=%C3%A4": answer(b"image")}, "http://a.example:PORT/x y?k=ä#part")
    assert found == b"image" and names.questions == ["a.example"]
    head = served.requests[0].lower()
    assert b"host: a.example:" in head and b"authorization" not in head and b"cookie" not in head


def test_without_length_and_in_chunks():
    whole = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nimage"
    chunks = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nima\r\n2\r\nge\r\n0\r\n\r\n"
    )
    for page in (whole, chunks):
        assert run({"/": page}, "http://a.example:PORT/")[0] == b"image"


@pytest.mark.parametrize(
    "domains, host, allowed",
    [
        (("a.example",), "a.example", True),
        (("A.Example.",), "a.EXAMPLE.", True),
        (("a.example",), "b.example", False),
        (("a.example",), "x.a.example", False),
        (("a.example",), "aa.example", False),
        (("*.example",), "a.example", True),
        (("*.example",), "a.b.example", True),
        (("*.example",), "example", False),
        (("*.example",), "aexample", False),
        (("example",), "a.example", False),
        (("*",), "anything", True),
    ],
)
def test_hosts(domains, host, allowed):
    assert fetcher(Names(), domains)._is_allowed(host.lower().rstrip(".")) == allowed


def test_other_hosts_are_not_asked_for():
    found, served, names = run({"/": answer(b"image")}, "http://b.example:PORT/", domains=("a.example",))
    assert "'b.example' is not one that --allowed-media-domains names" in found
    assert not served.requests and not names.questions


@pytest.mark.slow
@pytest.mark.parametrize("address", [address for address in PRIVATE if address])
def test_names_that_resolve_to_private_addresses(address):
    """One private address among several is enough. Nothing is connected to."""
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        names = Names(a=[addresses])
        found, served, _ = run({"/": answer(b"image")}, "http://a.example:PORT/", names=names, permits=is_public)
        assert "has an address that is not public" in found and not served.requests


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "127.1", "0", "[::ffff:127.0.0.1]"]
)
def test_addresses_in_urls(host):
    """In every way in which this machine's own resolver understands them."""

    async def main() -> str:
        async with site() as (served, port):
            with pytest.raises(Refused) as error:
                await Fetcher(["*"], 1000, 5.0).fetch(f"http://{host}:{port}/")
            assert not served.requests
            return str(error.value)

    assert "not public" in (why := asyncio.run(main())) or "is not known" in why or "not valid" in why


def test_a_name_that_changes_its_mind():
    """The first answer is checked and used; nobody asks a second time."""
    names = Names(a=[["127.0.0.1"], [PUBLIC]])
    found, _, _ = run({"/": answer(b"image")}, "http://a.example:PORT/", names=names)
    assert found == b"image" and names.questions == ["a.example"]
    names = Names(a=[[PUBLIC], ["127.0.0.1"]])
    connected = []

    async def main() -> None:
        loader = Fetcher(["*"], 1000, 5.0, names, is_public)

        async def connect(host: str, *rest: Any) -> Any:
            connected.append(host)
            raise OSError

        loader._backend._sockets.connect_tcp = connect
        with pytest.raises(Refused, match="the connection failed"):
            await loader.fetch("http://a.example/")

    asyncio.run(main())
    assert connected == [PUBLIC] and names.questions == ["a.example"]


def test_redirects_are_followed_and_checked_again():
    pages = {"/": to("/two"), "/two": to("http://b.example:PORT/three?x", 307), "/three?x": answer(b"image")}
    found, served, names = run(pages, "http://a.example:PORT/")
    assert found == b"image" and len(served.requests) == 3
    assert names.questions == ["a.example", "a.example", "b.example"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "location, says",
    [
        ("http://b.example:PORT/", "'b.example' is not one that --allowed-media-domains names"),
        ("http://127.0.0.1:PORT/", "'127.0.0.1' is not one"),
        ("file:///etc/passwd", "neither http nor https"),
        ("ftp://a.example/", "neither http nor https"),
        ("gopher://a.example/", "neither http nor https"),
        ("//b.example/", "'b.example' is not one"),
        ("http://user:password@a.example/", "a name or a password"),
        ("http://[", "not valid"),
        ("http://a.example:99999/", "not valid"),
        ("", "redirects more than"),  # to itself
        ("/", "redirects more than"),
    ],
)
def test_redirects_to_elsewhere(location, says):
    found, served, _ = run(
        {"/": to(location), "/x": answer(b"secret")}, "http://a.example:PORT/", domains=("a.example",)
    )
    assert isinstance(found, str) and says in found
    assert len(served.requests) <= MAX_REDIRECTS + 1


def test_a_redirect_to_a_name_with_a_private_address():
    names = Names(a=[["127.0.0.1"]], b=[["10.0.0.1"]])
    found, served, _ = run({"/": to("http://b.example/")}, "http://a.example:PORT/", names=names)
    assert "'b.example' has an address that is not public" in found and len(served.requests) == 1


def test_a_redirect_back_to_a_name_that_became_private():
    names = Names(a=[["127.0.0.1"], ["169.254.169.254"]])
    found, served, _ = run({"/": to("/two"), "/two": answer(b"x")}, "http://a.example:PORT/", names=names)
    assert "not public" in found and len(served.requests) == 1


def test_urls_that_are_none():
    for url in ("http://", "http://[::1", f"http://a.example/{'x' * MAX_URL}", "http://a.example:x/", "http://\udcff/"):
        assert isinstance(run({}, url)[0], str)


def test_unknown_hosts_and_closed_ports():
    class Nobody(Names):
        async def __call__(self, host: str, port: int) -> list[str]:
            raise socket.gaierror

    assert "'a.example' is not known" in run({}, "http://a.example:PORT/", names=Nobody())[0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "the connection failed" in run({}, f"http://a.example:{port}/")[0]


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 404, 500])
def test_other_answers(status):
    assert f"status {status}" in run({"/": answer(b"x" if status != 204 else b"", status)}, "http://a.example:PORT/")[0]


def test_what_is_not_http():
    for page in (b"SSH-2.0-OpenSSH\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx"):
        assert "the connection failed" in run({"/": page}, "http://a.example:PORT/")[0]


def test_too_many_bytes():
    limit = {"max_bytes": 1000}
    assert run({"/": answer(bytes(1000))}, "http://a.example:PORT/", **limit)[0] == bytes(1000)
    assert "more than 1000 bytes" in run({"/": answer(bytes(1001))}, "http://a.example:PORT/", **limit)[0]
    written = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while written < 1 << 26:
            writer.write(bytes(1 << 16))
            written += 1 << 16
            await writer.drain()

    assert "more than 1000 bytes" in run({"/": endless}, "http://a.example:PORT/", **limit)[0]
    assert written < 1 << 25


def test_slow_answers():
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3)

    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(60):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    for page in (silent, slow):
        started = time.perf_counter()
        assert "did not answer within 0.2 seconds" in run({"/": page}, "http://a.example:PORT/", timeout=0.2)[0]
        assert time.perf_counter() - started < 2


# ---- in requests


@pytest.fixture
def reachable(seeing: RunningServer, monkeypatch) -> dict[str, bytes]:
    """Pages at http://images.example/, which `seeing` may load."""
    pages: dict[str, bytes] = {}

    async def fetch(self: Fetcher, url: str) -> bytes:
        async with site() as (served, port):
            served.pages = dict(pages)
            self._backend._resolve = Names(images=[["127.0.0.1"]])
            self._backend._permits = lambda address: address == "127.0.0.1"
            return await original(self, url.replace("images.example", f"images.example:{port}"))

    original = Fetcher.fetch
    monkeypatch.setattr(Fetcher, "fetch", fetch)
    return pages


def test_an_image_by_url(seeing, sent, reachable):
    reachable["/a.png"] = answer(picture("red"))
    part = {"type": "image_url", "image_url": {"url": "http://images.example/a.png"}}
    answered = seeing.http.post(CHAT, json=asks(part))
    assert answered.status_code == 200, answered.text
    assert answered.json()["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_TOKENS
    local = asks({"type": "image_url", "image_url": {"url": "http://images.example/none.png"}})
    missing = seeing.http.post(CHAT, json=local)
    assert is_error(missing, 400, None, "messages.0.content.0.image_url") and "status 404" in missing.text


def test_this_machine_is_not_reachable(seeing):
    """As a client would try, without any of the test's help: the name is allowed, its address is not."""
    seeing.state.images._fetcher = None
    for host in ("localhost", "127.0.0.1", "169.254.169.254"):
        answered = seeing.http.post(CHAT, json=asks({"type": "image_url", "image_url": {"url": f"http://{host}/"}}))
        assert is_error(answered, 400, None, "messages.0.content.0.image_url")
        assert "--allowed-media-domains" in answered.text


def test_without_httpcore_the_flag_is_refused_at_the_start(seeing_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpcore", None)
    config = Config(model=ModelConfig(model=seeing_folder), media=MediaConfig(allowed_media_domains=["images.example"]))
    tokenizer = Tokenizer.load(seeing_folder)
    with pytest.raises(ValueError, match=r"--allowed-media-domains needs .*httpcore: pip install 'quire\[files\]'"):
        Images(config).open(seeing_folder, tokenizer)
    config = Config(model=ModelConfig(model=seeing_folder))
    images = Images(config)
    images.open(seeing_folder, tokenizer)
    assert images.why_not is None


def test_without_pillow_requests_with_images_are_refused(seeing_folder, monkeypatch):
    """The model serves text; an image gets 501 and the name of the extra, an unknown option likewise."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    images = Images(Config(model=ModelConfig(model=seeing_folder)))
    images.open(seeing_folder, Tokenizer.load(seeing_folder))
    for refused in (
        lambda: asyncio.run(images.load([MediaInput(param="messages.0")], None, None, "messages", 9, "a")),
        lambda: images.check_options({"size": 1}),
    ):
        with pytest.raises(NotInstalled, match=r"pip install 'quire\[files\]'") as raised:
            refused()
        assert raised.value.status == 501 and raised.value.code == "not_installed"
