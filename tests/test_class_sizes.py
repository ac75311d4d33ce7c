"""No class has more functions than a reader can keep in mind: engine, process_group, and smp."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC, SMP = ROOT / "csrc", ROOT / "smddp" / "modelparallel"
FOLDERS = ("engine", "process_group")
MOST = 30
# Class -> how many it has instead, and why that is better than two classes.
EXCEPTIONS: dict[str, tuple[int, str]] = {}

CLASS = re.compile(r"\b(?:class|struct)\s+(?:alignas\([^)]*\)\s*)?(\w+)[^;{}()]*\{")
NO_FUNCTION = re.compile(r"(friend|using|typedef|enum|static_assert|struct|class)\b")
TYPE_ARGUMENTS = re.compile(r"<[^<>]*>")


def code_of(text: str) -> str:
    """Returns C++ without comments, texts and directives."""
    text = re.sub(r"//[^\n]*|^[ \t]*#[^\n]*", "", text, flags=re.M)
    return re.sub(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'', '""', text)


def members(code: str, begin: int) -> list[str]:
    """Returns the declarations of a class whose brace is at `begin`, without what is in braces."""
    found, current, depth = [], "", 0
    for character in code[begin:]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            break
        is_end = character == ";" or (character == "}" and ")" in current.split("=")[0])
        if depth == 1 and is_end:
            found.append(current)
            current = ""
        elif depth == 1 and character not in "{}":
            current += character
    return found


def functions(code: str, begin: int, name: str) -> set[str]:
    """Returns the names of a class's own functions: overloads once, none that it inherits."""
    names = set()
    for member in members(code, begin):
        member = re.sub(r"\b(public|private|protected)\s*:(?!:)", "", member).strip()
        member = re.sub(r"\[\[\w+\]\]|\bSMDDP_\w+(\([^()]*\))?|^template\s*<[^()]*?>", "", member)
        while TYPE_ARGUMENTS.search(member):
            member = TYPE_ARGUMENTS.sub("", member)
        head = member.strip().split("(")[0]
        if NO_FUNCTION.match(member.strip()) or "(" not in member or "=" in head:
            continue
        own = re.search(r"\w[\s*&]+(\w+)\s*$", head)
        if own is None or own[1] in {name, "operator"} or re.search(r"\boverride\b", member):
            continue
        names.add(own[1])
    return names


def classes(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yields the classes of a file with the names of their functions."""
    code = code_of(text)
    for found in CLASS.finditer(code):
        yield found[1], functions(code, found.end() - 1, found[1])


def python_classes(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yields the classes of a module with the names of their own functions."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield node.name, {one.name for one in node.body if isinstance(one, kinds)}


def sizes_of_classes() -> dict[str, int]:
    """Returns how many functions each class has; of two with one name, the larger number."""
    headers = (path for folder in FOLDERS for path in (CSRC / folder).rglob("*.h"))
    found = [one for path in headers for one in classes(path.read_text())]
    found += [one for path in SMP.rglob("*.py") for one in python_classes(path.read_text())]
    sizes: dict[str, int] = {}
    for name, names in found:
        sizes[name] = max(sizes.get(name, 0), len(names))
    return sizes


def test_no_class_has_too_many_functions() -> None:
    sizes = sizes_of_classes()
    assert sizes["Engine"] > 20
    assert sizes["ProcessGroup"] > 10
    assert sizes["Baton"] > 15
    most = {name: EXCEPTIONS.get(name, (MOST, ""))[0] for name in sizes}
    assert {name: size for name, size in sizes.items() if size > most[name]} == {}
    needless = [name for name in EXCEPTIONS if sizes.get(name, 0) <= MOST]
    assert not needless, f"take {', '.join(needless)} out of EXCEPTIONS"


def test_functions_of_python_are_counted() -> None:
    text = """
class One:
    @property
    def a(self): ...
    @a.setter
    def a(self, value): ...
    async def b(self):
        def inner(): ...
    class Two:
        def c(self): ...
    d = lambda: 0
"""
    assert dict(python_classes(text)) == {"One": {"a", "b"}, "Two": {"c"}}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("int size() const { return sizes_.size(); }", {"size"}),
        ("template <typename T>\n  bool attempt(T step);", {"attempt"}),
        ("std::map<std::string, std::vector<int>> all(int a = 0);", {"all"}),
        ("void a(); void a(int); [[noreturn]] void b() noexcept;", {"a", "b"}),
        ("const Part& part() const { return part_; }\n  Part* find(int a);", {"part", "find"}),
        ("explicit Thing(int a) : a_(a) {}\n  ~Thing();\n  Thing(const Thing&) = delete;", set()),
        (
            "bool idle() const override;\n  std::function<void(int)> action_;\n  int a_ = f(1);",
            set(),
        ),
        ("struct Part { void inner(); };\n  enum class Kind { A, B };\n  friend void f();", set()),
    ],
)
def test_functions_are_counted(line: str, expected: set[str]) -> None:
    found = dict(classes(f"class Thing final : public Base {{\n public:\n  {line}\n}};"))
    assert found["Thing"] == expected
