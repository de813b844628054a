"""Plain language in docstrings, settings, README, pages and tutorials.

``python test/test_words.py [PATH ...]`` prints the violations in all files or below the paths.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS, MOST_IN_CELL, MOST_IDIOM, README_LINES = 25, 20, 0.02, 110

# Free relative clauses and unusual words, in the first line of a docstring or a setting.
IDIOM = re.compile(
    r"""\b(who|whose|whom|what|whatever|whoever|told|tells|anew|sick|ill|heeds?|somebody|nobody
    |go(?:es)?\ on|went\ on|as\ far\ as|of\ (?:one|its|their|his|your|our)(?:'s)?\ own|worlds?|alike
    |one\ after\ the\ other|side\ by\ side|looks?\ at)\b|^(?:Which|Where|How|Whether|When)\b""",
    re.VERBOSE | re.IGNORECASE,
)
# Forbidden in pages, docstrings and settings: the field has a word (docs/glossary.md).
OLD = re.compile(
    r"""\b(anew|sick|heed(?:s|ed)?|stored\ steps|as\ far\ as\ there\ is|of\ one's\ own
    |goes\ on\ from|go\ on\ from|(?:toy\ |own\ )?worlds?)\b""",
    re.VERBOSE | re.IGNORECASE,
)
# Names of tests state the expectation: test_invalid_names_raise, not test_what_does_not_fit.
RIDDLE = re.compile(
    r"_(?:who|whose|whom|what|whatever|anew|sick|heeds?|told|tells|somebody|nobody|one_s_own)(?=_|$)"
)
# Names of other projects, files and values, which are allowed.
NAMES = re.compile(
    r"`[^`]*`|simple_world_comm|world[_ .]size|world_state|world\.signature|real[- ]world"
    r"|\"world\"|'world'|state=world|\bWorld\b",
)
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "docs/**/*.md")
NOT_PROSE = ("docs/glossary.md",)  # a table of old words


def documented(tree):
    """Yields the line and text of every docstring, also those below a class's fields."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, own in zip([None, *node.body], node.body):
            placed = before is None or isinstance(before, ast.AnnAssign | ast.Assign)
            if placed and isinstance(own, ast.Expr) and isinstance(own.value, ast.Constant):
                yield own.lineno, str(own.value.value).strip()


def docstrings():
    """Yields the file, line and text of every docstring of the package."""
    for path in sorted(ROOT.glob("torchrl_marl/**/*.py")):
        for line, text in documented(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(ROOT)}:{line}", text


def first_line(text):
    return NAMES.sub("X", re.sub(r"``[^`]*``", "X", text.splitlines()[0] if text else ""))


def in_idiom():
    """Returns the first lines of all docstrings and settings, and the violations."""
    lines = [(place, first_line(text)) for place, text in docstrings()]
    return lines, [(place, text) for place, text in lines if IDIOM.search(text)]


def pages():
    """Yields the name and text of README, pages and tutorials."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if name not in NOT_PROSE:
                yield name, path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("tutorials/*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        yield str(path.relative_to(ROOT)), "\n\n".join(texts)


def plain(text):
    """Returns Markdown without code, formulas, addresses, pictures and comments."""
    text = re.sub(r"^( *)(```|~~~)[\s\S]*?^\1\2 *$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"<!--[\s\S]*?-->|<[^>\n]+>", " ", text)
    text = re.sub(r"\$\$[\s\S]*?\$\$", "\n\n", text)
    text = re.sub(r"`+[^`]+`+|\$[^$\n]+\$", "X", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"https?://\S+", "X", text)


def blocks(text):
    """Yields paragraphs and items, and ``(True, cell)`` for the cells of tables."""
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )|\n(?=#+ )|\n(?=\|)", plain(text)):
        if part.strip().startswith("|"):
            for row in part.splitlines():
                yield from ((True, cell) for cell in row.strip().strip("|").split("|"))
        else:
            yield False, " ".join(re.sub(r"^\s*(?:[-*+>]|\d+\.|#+) ", "", part).split())


def words(text):
    return re.findall(r"[\w'’%./+*-]*\w[\w'’%./+*-]*", re.sub(r"(?<=\d),(?=\d)", "", text))


def sentences(text):
    return re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9X])", text)


def long_in(text):
    """Yields the sentences and cells of a page that are too long, and chains of semicolons."""
    for is_cell, part in blocks(text):
        if is_cell and len(words(part)) > MOST_IN_CELL:
            yield f"cell of {len(words(part))} words: {part.strip()}"
        for sentence in [] if is_cell else sentences(part):
            if len(words(sentence)) > MOST_WORDS:
                yield f"{len(words(sentence))} words: {sentence}"
            elif sentence.count(";") > 1:
                yield f"{sentence.count(';')} semicolons: {sentence}"


def old_in(text):
    """Yields the old words of a text."""
    yield from (f"old word {found.group()!r}" for found in OLD.finditer(NAMES.sub("X", text)))


def faults(name, text):
    return [*long_in(text), *old_in(plain(text))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Returns what critics see.", True),
        ("Whose ends stop the return.", True),
        ("Draws the starts anew.", True),
        ("Which done flag cuts the return: the team's or each agent's.", True),
        ("Done flag that cuts the return: the team's or each agent's.", False),
        ("Returns whether a run has a checkpoint, which may be cut.", False),
    ],
)
def test_idiom_matches(text, found):
    assert bool(IDIOM.search(text)) == found


def test_long_in_reports_long_sentences():
    words_of_24 = " ".join(["word"] * 24)
    item, code = f"- {words_of_24} [x](y/z.md).", f"```\n{words_of_24} b c\n```"
    text = f"Long {words_of_24} `a b c`.\n\n{item}\n\n{code}\n"
    assert [x.partition(":")[0] for x in long_in(text)] == ["26 words"]
    assert [x.partition(":")[0] for x in long_in(f"| {words_of_24} | x |\n")] == [
        "cell of 24 words"
    ]
    assert list(long_in("One; two; three.")) == ["2 semicolons: One; two; three."]


def test_first_lines_of_docstrings_are_plain():
    lines, found = in_idiom()
    text = "\n".join(f"{place}: {line}" for place, line in found)
    assert len(found) <= MOST_IDIOM * len(lines), text


def test_docstrings_have_no_old_words():
    found = [f"{place}: {x}" for place, text in docstrings() for x in old_in(text)]
    assert not found, "\n".join(found)


def test_names_of_tests_are_plain():
    names = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.glob("test/**/test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(names) > 3000
    assert [name for name in names if RIDDLE.search(name)] == []


@pytest.mark.parametrize(("name", "text"), [pytest.param(*x, id=x[0]) for x in pages()])
def test_pages_are_plain(name, text):
    assert not faults(name, text)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def main(below):
    lines, found = in_idiom()
    for place, line in found:
        if place.startswith(below):
            print(f"{place}: {line}")
    for place, text in docstrings():
        for x in old_in(text) if place.startswith(below) else ():
            print(f"{place}: {x}")
    for name, text in pages():
        for x in faults(name, text) if name.startswith(below) else ():
            print(f"{name}: {x}")
    print(
        f"{len(found)} of {len(lines)} first lines ({len(found) / len(lines):.1%})", file=sys.stderr
    )


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or ("",))
