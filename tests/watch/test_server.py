"""The server of the page: for this machine only, and with all that the page needs."""

import http.client
import json
import re
from pathlib import Path

import pytest

from fusedrec_torchrec.watch.server import FILES, FOLDER, POLICY, WatchServer
from tests.watch.runs import record, text_of, whole_run, write_run
from tests.watch.serving import served


def get(server: WatchServer, path: str, host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, dict(answer.headers), answer.read().decode()


def test_the_page_and_what_it_names_are_there(tmp_path: Path) -> None:
    with served(whole_run(tmp_path)) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)
        status, headers, page = get(server, "/")
        assert status == 200 and headers["Content-Type"].startswith("text/html")
        for name in re.findall(r'(?:href|src)="([^"]+)"', page):
            assert name == "data:," or get(server, f"/{name}")[0] == 200, name
        assert get(server, "/no")[0] == get(server, "/../run.py")[0] == 404


def test_nothing_comes_from_elsewhere() -> None:
    """Works offline: no file of the page names another host, and the browser would not ask it."""
    for name, _ in FILES.values():
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "//cdn" not in text
    assert "default-src 'none'" in POLICY


def test_data_follow_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, [record(10)])
    with served(tmp_path) as server:
        status, headers, text = get(server, "/data.json")
        assert status == 200 and headers["Cache-Control"] == "no-store"
        data = json.loads(text)
        assert data["every"] == 2.0 and data["runs"][0]["step"] == 10
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(text_of([record(20)]) + '{"step": 30, "ki')
        assert json.loads(get(server, "/data.json?again")[2])["runs"][0]["step"] == 20


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:9000", 200),  # at the end of a tunnel
        ("127.0.0.1:1", 200),
        ("example.org", 403),
        ("example.org:80", 403),
        ("127.0.0.1.example.org", 403),
    ],
)
def test_other_names_are_refused(tmp_path: Path, host: str, status: int) -> None:
    with served(whole_run(tmp_path)) as server:
        assert get(server, "/data.json", host)[0] == status
