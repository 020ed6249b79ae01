"""Finds sentences that must be read twice, in what users read: pages, flag help, docstrings of public names, errors.

python -m tests.language            # every sentence that breaks a rule
python -m tests.language --sample   # sentences, docstrings and errors drawn by a seed, for a reader to judge
"""

import ast
import pathlib
import random
import re
import sys
from collections.abc import Iterator

import pyphen

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Of these, quoted texts of programs and recorded tables are no prose of ours, or only developers read them.
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")), *DOCS,
         ROOT / "docs" / "contributing" / "how-we-test.md"]  # fmt: skip

MOST_WORDS = 25
# Flesch's reading ease of a page: 60 and above is plain English. Most pages are easier: code in them counts as a word.
LEAST_EASE = 75

# What is not written, and what is written instead.
CONSTRUCTIONS = {
    r"(that|those|the one|the ones) of (?!the\b.{0,30}\bthat\b)": "repeat the noun",
    r"of (one's|your|its|his|their|my|our) own": "custom, or leave it out",
    r"(a|an|the) \w+ of (yours|theirs)": "your",
    r"anew": "again",
    r"whoever": "who, people who",
    r"(is|are|was|were|be|been) told": "raises, gets",
    r"but for": "except",
    r"for want of": "without",
    r"in place of": "instead of",
    r"at the begin": "at the start",
    r"likewise": "also",
    r"heed(s|ed)?": "respect, read",
    r"a line says": "prints",
    r"in parts": "sharded",
    r"none but": "only",
    r"none (is|are|was|were)": "no and the noun",
    r"so as to": "to",
    r"save for": "except",
    r"by way of": "through",
    r"thereby|therein|thereof|wherein|whereby|hence|thus": "so",
    r"as yet": "yet",
    r"nothing but": "only",
    r"what is (?:in|of|for|beyond|behind)": "name the thing",
    r"alike": "the same ... on every backend",
    r"as ever": "as before",
    r"the (former|latter)": "repeat the noun",
    r"beside": "next to, compared with",
    r"once more": "again",
    r"(is|are|was|were) to come": "remain, follow",
    r"refus(e|es|ed|ing)": "raises an error",
    r"(has|have|had) to be": "must",
}


def prose(text: str) -> str:
    """Returns the text of a Markdown page without code, links' targets, headings' marks and HTML."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "CODE", text)


def blocks(page: pathlib.Path) -> Iterator[str]:
    """Yields paragraphs, list items, and the meanings in the tables of flags.md. Other tables have phrases only."""
    lines: list[str] = []
    for line in [*prose(page.read_text()).splitlines(), ""]:
        is_new = not line.strip() or re.match(r"\s*([-*] |\d+\. |#|\||>)", line)
        if is_new and lines:
            yield " ".join(lines)
            lines = []
        if line.startswith("|"):
            if page.name == "flags.md" and line.startswith("| CODE"):
                yield line.rsplit("|", 2)[1].strip()
        elif line.strip():
            lines.append(re.sub(r"^\s*([-*] |\d+\. |#+ |>)\s*", "", line).replace("**", "").strip())


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a paragraph. Text after a colon counts as a sentence."""
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|no)\.", r"\1", text)
    begin = r"[A-Z(`\"']|kerasdp|keras|torch|jax|tensorflow"
    return [part.strip() for part in re.split(rf"(?<=[.!?])\)?\s+(?={begin})|(?<=:)\s+", text) if part.strip()]


def errors() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each error and warning of the package; `...` is filled in."""
    for path in sorted((ROOT / "kerasdp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "warn" or re.fullmatch(r"\w*Error", name):
                text = _filled(node.args[0])
                if len(text.split()) > 2:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _filled(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _filled(node.left) + _filled(node.right)
    return ""


def texts() -> Iterator[tuple[str, str, str]]:
    """Yields the page, the place and a sentence, of all that users read. Errors may say three things in a line."""
    for page in PAGES:
        for block in blocks(page):
            for sentence in sentences_of(block):
                yield page.name, str(page.relative_to(ROOT)), sentence
    for place, text in errors():
        for sentence in re.split(r"; |: |(?<=[.!?])\s+", text):
            yield "errors", place, sentence


def faults() -> Iterator[str]:
    """Yields each sentence that breaks a rule, with its place and the rule."""
    whole: dict[str, list[str]] = {}
    for page, place, sentence in texts():
        whole.setdefault(page, []).append(sentence)
        count = len(re.findall(r"[\w'./-]*\w[\w'./-]*", sentence))
        if count > MOST_WORDS:
            yield f"{place}: {count} words: {sentence}"
        for pattern, instead in CONSTRUCTIONS.items():
            if found := re.search(rf"\b(?:{pattern})\b", sentence, re.IGNORECASE):
                yield f"{place}: {found[0]!r}, write: {instead}: {sentence}"
    for page, parts in whole.items():
        if (ease := reading_ease(parts)) < LEAST_EASE:
            yield f"{page}: reading ease {ease:.0f}, expected at least {LEAST_EASE}"


def reading_ease(sentences: list[str]) -> float:
    """Returns the reading ease of Flesch (1948) of English sentences.

    textstat (0.7.13) has it, but downloads a dictionary when it is first used; 0.7.7 installs a package `tests`.
    """
    hyphens = pyphen.Pyphen(lang="en_US")
    words = re.findall(r"[A-Za-z]+", " ".join(sentences))
    num_syllables = sum(len(hyphens.positions(word)) + 1 for word in words)
    return 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * num_syllables / len(words)


def sample(seed: int = 0) -> str:
    """Returns 100 sentences of the pages, 50 docstrings and 50 errors, drawn by a seed."""
    draw = random.Random(seed)
    pages = [sentence for page, _, sentence in texts() if page not in ("api.md", "flags.md", "errors", "CHANGELOG.md")]
    docstrings = [
        f"{path.name}: {node.name}: {' '.join(text.split())}"
        for path in sorted((ROOT / "kerasdp").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node))
    ]
    drawn = (
        draw.sample([one for one in pages if len(one.split()) > 4], 100),
        draw.sample(docstrings, 50),
        draw.sample([text for _, text in errors()], 50),
    )
    return "\n\n".join("\n".join(f"{number}. {one}" for number, one in enumerate(part, 1)) for part in drawn)


if __name__ == "__main__":
    print(sample() if "--sample" in sys.argv else "\n".join(faults()))
