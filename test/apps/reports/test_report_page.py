"""The files of a report: a self-contained page, and the folders it may be written to."""

import errno
import itertools
import json
import os
import re
import sys
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest
import yaml
from reported import write_run, write_suite

from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.plotting import learning_curve
from torchrl_marl.apps.reports import make_report, write_report
from torchrl_marl.apps.reports.page import page
from torchrl_marl.apps.reports.pictures import _figures
from torchrl_marl.errors import ConfigError, MissingExtraError, WriteError
from torchrl_marl.training.files import open_atomically

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.pictures

FILES = [
    "curves.csv",
    "curves.png",
    "evaluations.csv",
    "report.html",
    "report.md",
    "results.csv",
    "together.png",
]


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the unclosed ones."""

    EMPTY = ("meta", "link", "input", "br")

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def data_of(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1]
    )


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    return write_suite(folder, ["balance", "wheel"], seeds=2, points=5)


def test_page_has_no_external_resources(suite):
    text = page(make_report(suite))
    elements = Elements(text)
    assert not elements.open
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for tag, attributes in elements.found:
        assert tag not in ("iframe", "object", "img")
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:"))
    policy = next(a["content"] for t, a in elements.found if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    identifiers = [a["id"] for _, a in elements.found if "id" in a]
    assert len(identifiers) == len(set(identifiers))


def test_page_data_has_every_run(suite):
    found = data_of(page(make_report(suite)))
    assert found["algorithms"] == ["IPPO", "MAPPO"]
    balance = found["tasks"][0]
    assert balance["name"] == "balance" and balance["random"] == -8.8
    line = balance["teams"][1]["evaluation"]
    assert line["frames"] == [0, 120_000, 240_000, 360_000, 480_000]
    assert [len(row) for row in line["each"]] == [2] * 5
    assert found["aggregates"][0]["improvements"][0].keys() == {
        "first", "second", "value", "low", "high",
    }  # fmt: skip


def test_names_from_runs_are_escaped(tmp_path):
    name = "</script><script>alert(1)</script>|`x`&"
    folder = tmp_path / 'a" onclick="alert(2)'
    config = write_run(folder, [0, 1]) / "config.yaml"
    own = yaml.safe_load(config.read_text())
    own["env"]["name"] = name.replace("/", "_")
    config.write_text(yaml.safe_dump(own))
    table = tmp_path / "other.csv"
    table.write_text(f"task,algorithm,seed,frames,return\narena,{name},0,9,9\n")
    text = page(make_report([folder, table]))
    elements = Elements(text)
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert not any("onclick" in attributes for _, attributes in elements.found)
    found = data_of(text)
    assert found["tasks"][0]["name"] == "<_script><script>alert(1)<_script>|`x`&"
    assert found["algorithms"][0] == name


def test_page_of_one_unfinished_run(tmp_path):
    """One unfinished run without seeds, random policy, training rows or agent frames."""
    write_run(tmp_path / "a", [0, 3], finished=False, training=False)
    text = page(make_report(tmp_path))
    assert "NaN" not in text.partition('id="data">')[2].partition("</script>")[0]
    assert "notes on these results" in text and "not finished" in text
    assert data_of(text)["aggregates"] == []


# Linear RGB as seen with color vision deficiencies (Machado et al., 2009), and without.
SEEN = {
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    "all": np.eye(3),
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


def lab(linear):
    x, y, z = np.cbrt(np.clip(np.array(TO_XYZ) @ linear / [0.9505, 1, 1.089], 0.009, None))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colors_are_distinguishable(mode):
    style = (resources.files("torchrl_marl.apps.reports") / "assets" / "report.css").read_text()
    found = dict(re.findall(r"--(c\d|card|ground): light-dark\(([^)]*)\)", style))
    digits = {name: pair.split(", ")[mode][1:] for name, pair in found.items()}
    srgb = {name: np.frombuffer(bytes.fromhex(x), np.uint8) / 255 for name, x in digits.items()}
    linear = {
        name: np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
        for name, x in srgb.items()
    }
    bright = {name: np.dot(TO_XYZ[1], x) + 0.05 for name, x in linear.items()}
    curves = sorted(name for name in linear if name[1:].isdigit())
    assert len(curves) == 8
    for name, other in itertools.product(curves, ("card", "ground")):
        assert max(bright[name] / bright[other], bright[other] / bright[name]) >= 3
    for (i, one), (j, other) in itertools.combinations(enumerate(curves), 2):
        seen = [
            lab(np.array(eyes) @ linear[one]) - lab(np.array(eyes) @ linear[other])
            for eyes in SEEN.values()
        ]
        assert min(map(np.linalg.norm, seen)) > 15, (i, j)


def test_report_files_are_written_and_replaced(suite, tmp_path):
    folder = tmp_path / "new" / "report"
    for _ in range(2):
        write_report(suite, folder)
        assert sorted(path.name for path in folder.iterdir()) == FILES
    text = (folder / "report.md").read_text()
    assert "![together.png](together.png)" in text and "![curves.png](curves.png)" in text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_concurrent_writes_of_a_file_succeed(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    with open_atomically(path, at_once=True) as file:
        file.write("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)  # another process
        with open_atomically(path, at_once=True) as other:
            other.write("other")
        assert path.read_text() == "other"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_pictures_do_not_clip_legends_and_titles(tmp_path):
    """A legend of long names below one narrow task, and the titles above three."""
    for i in range(4):
        settings = {"learner.lr": 0.001 * i + 1e-4, "learner.entropy_coeff": 0.1 * i}
        write_run(tmp_path / f"{i}", [0, i], **settings, **{"learner.gamma": 0.9 + 0.01 * i})
    pictures = dict(_figures(make_report(tmp_path)))
    assert set(pictures) == {"curves.png", "together.png"}
    for figure in pictures.values():
        figure.draw_without_rendering()
        (legend,) = figure.legends
        texts = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
        assert len(texts) == 4 and all(text.startswith("MAPPO (") for text in texts)
        boxes = [legend.get_window_extent(), *(axes.get_tightbbox() for axes in figure.axes)]
        for box in boxes:
            assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1 and box.y0 >= -1
        assert boxes[0].y1 <= min(box.y0 for box in boxes[1:]) + 1  # below the axes


def test_broken_matplotlib_is_treated_as_missing(suite, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.warns(UserWarning, match="no pictures are drawn: matplotlib cannot be imported"):
        write_report(suite, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [name for name in FILES if not name.endswith(".png")]
    with pytest.raises(MissingExtraError, match="cannot be imported.*pip install"):
        learning_curve(suite / "balance")


def test_folders_without_a_report_are_not_overwritten(suite, tmp_path):
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'report.md' but no report.*use --out FOLDER"):
        write_report(suite, tmp_path)
    assert (tmp_path / "report.md").read_text() == "mine"
    (tmp_path / "report.html").write_text("<html>mine</html>")
    with pytest.raises(ConfigError, match="but no report"):
        write_report(suite, tmp_path)
    with pytest.raises(ConfigError, match="is a file, expected a folder"):
        write_report(suite, tmp_path / "report.md")


def test_run_folder_is_refused_as_report_folder(suite):
    with pytest.raises(ConfigError, match="but no report"):
        write_report(suite, suite / "balance" / "mappo" / "seed0")


def test_raw_results_do_not_replace_other_files(suite, tmp_path):
    """`--json` with the record of a suite made the suite unusable; `--json .` crashed."""
    record, out = tmp_path / "suite.json", tmp_path / "out"
    record.write_text('{"suite": "toy", "seeds": [0]}\n')
    for path, what in (
        (record, "a file without raw results"),
        (tmp_path, "a folder"),
        (out / "results.csv", "a file of the report itself"),
    ):
        with pytest.raises(ConfigError, match=f"is {what}.*use another --json FILE"):
            write_report(suite, out, raw=path)
    assert record.read_text() == '{"suite": "toy", "seeds": [0]}\n' and not out.exists()
    for _ in range(2):  # its own file is replaced
        write_report(suite, out, raw=tmp_path / "raw.json")


def test_full_disk_leaves_no_partial_files(suite, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(WriteError, match="No space left on device"):
        patch.setattr(os, "fsync", full)
        write_report(suite, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_report(suite, tmp_path)


def test_unwritable_folder_raises(suite, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written"):
        write_report(suite, tmp_path / "file" / "report")


def test_report_command(suite, tmp_path, capsys):
    broken = write_run(tmp_path / "runs" / "broken", [0, 1])
    (broken / "metrics.csv").write_text("x\n1\n")
    out = tmp_path / "out"
    assert cli.main(["report", str(suite), str(tmp_path / "runs"), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "MAPPO" in printed.out and printed.out.endswith(f"{out / 'report.html'}\n")
    assert "left out: " in printed.err and "has no column 'frames'" in printed.err
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert cli.main(["report", str(tmp_path / "none"), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "is not a run folder" in error and error.count("\n") == 1


if __name__ == "__main__":
    pytest.main([__file__])
