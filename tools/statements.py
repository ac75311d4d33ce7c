"""Finds statements and conditions of C++ that mutate.py can change."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What tests cannot see: texts of logs, and checks that only builds with sanitizers have.
LEFT_OUT = re.compile(r"SMDDP_LOG|.*assertOwned\(\)|static_assert|assert\(")


@dataclass
class Mutant:
    """One change: text that is inserted before and behind a range of a file."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    text: str


class Scanner:
    """Finds what can be changed in a file that clang-format has formatted."""

    _TOKENS = re.compile(
        r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*"  # left out
        r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_]\w*|\d[\w.\']*'
        r"|::|->|\+\+|--|<<=|>>=|[-+*/%&|^=!<>]=|&&|\|\||[^\s]",
        re.S | re.M,
    )
    _ASSIGN = frozenset(["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="])
    _JUMPS = frozenset(
        ["break", "continue", "throw", "goto", "using", "delete", "enum", "template"]
    )
    _BEFORE_BODY = frozenset([")", "const", "noexcept", "override", "final", "mutable", "]", "try"])

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text, self.found = file, text, list[Mutant]()
        matches = [m for m in self._TOKENS.finditer(text) if not re.match(r"\s*(//|/\*|#)", m[0])]
        self._at = [m.start() for m in matches]
        self._token = [m[0] for m in matches]
        self._partner: dict[int, int] = {}
        stack = []
        for i, token in enumerate(self._token):
            if token in "([{":
                stack.append(i)
            elif token in ")]}":
                self._partner[stack.pop()] = i
        self._declarations(0, len(self._token))

    def _add(self, kind: str, first: int, last: int) -> None:
        """Notes the tokens from first to last, without last."""
        start, end = self._at[first], self._at[last - 1] + len(self._token[last - 1])
        text = " ".join(self._text[start:end].split())
        if not LEFT_OUT.match(text):
            line = self._text.count("\n", 0, start) + 1
            self.found.append(Mutant(self._file, line, start, end, kind, text))

    def _declarations(self, i: int, end: int) -> None:
        start = i
        while i < end:
            token = self._token[i]
            if token == "{":
                head, close = self._token[start:i], self._partner[i]
                if self._is_body(i):
                    self._body(i, head)
                    start = close + 1
                elif head[:1] == ["namespace"] or (
                    {"class", "struct", "union"} & {*head} and "enum" not in head
                ):
                    self._declarations(i + 1, close)
                i = close
            elif token == ";":
                start = i + 1
            elif token in "([":
                i = self._partner[i]
            i += 1

    def _is_body(self, brace: int) -> bool:
        i = brace - 1
        if self._token[i] in self._BEFORE_BODY or (
            self._token[i] == "}" and ":" in self._token[i - 9 : i]
        ):
            return True
        while i > 0 and re.match(r"\w|::|[<>*&,]", self._token[i]):
            i -= 1
        return self._token[i] == "->"  # the type of a result

    def _body(self, brace: int, head: list[str]) -> None:
        if "constexpr" in head or "consteval" in head:
            return
        before = head[: head.index("(")] if "(" in head else head
        self._block(brace, "bool" if "bool" in before else "other")

    def _block(self, brace: int, result: str) -> int:
        i, end = brace + 1, self._partner[brace]
        while i < end:
            i = self._statement(i, result)
        return end + 1

    def _inside(self, i: int, end: int) -> None:
        """Looks for the bodies of lambdas in an expression."""
        while i < end:
            if self._token[i] == "{" and self._is_body(i):
                i = self._block(i, "lambda")
            else:
                i += 1

    def _until_semicolon(self, i: int) -> int:
        while self._token[i] != ";":
            i = self._partner.get(i, i) + 1
        return i

    def _statement(self, i: int, result: str) -> int:
        """Returns the token behind the statement that begins with token i."""
        token = self._token[i]
        if token == "{":
            return self._block(i, result)
        if token in ("case", "default"):
            while self._token[i] != ":":
                i += 1
            return i + 1
        if token in ("else", "do", "try"):
            return self._statement(i + 1, result)
        if token in ("if", "for", "while", "switch", "catch"):
            fixed = self._token[i + 1] == "constexpr"
            first = i + 1 + fixed
            last = self._partner[first]
            if token == "if" and not fixed and not {"=", ";"} & {*self._flat(first + 1, last)}:
                self._add("invert", first + 1, last)
            self._inside(first, last)
            return self._statement(last + 1, result)
        if token in ("struct", "class"):
            end = self._until_semicolon(i)
            self._declarations(i, end)
            return end + 1
        end = self._until_semicolon(i)
        if token == "return":
            flat = {*self._flat(i + 1, end)}
            compares = {"==", "!=", "<", ">", "<=", ">=", "&&", "||"} & flat and "?" not in flat
            if end > i + 1 and (result == "bool" or (result == "lambda" and compares)):
                self._add("invert", i + 1, end)
        elif token not in self._JUMPS and self._is_expression(i, end):
            self._add("leave out", i, end + 1)
        self._inside(i, end)
        return end + 1

    def _flat(self, i: int, end: int) -> list[str]:
        """Returns the tokens that are in no brackets."""
        tokens = []
        while i < end:
            tokens.append(self._token[i])
            i = self._partner.get(i, i) + 1
        return tokens

    def _is_expression(self, i: int, end: int) -> bool:
        """Tells a call, an assignment or an increment from a declaration."""
        if self._token[i] in ("++", "--", "*"):
            return True
        while i < end:
            token = self._token[i]
            if token in self._ASSIGN or token in ("++", "--"):
                return True
            if token in "([":
                i = self._partner[i] + 1
            elif token in ("::", ".", "->"):
                i += 1
            elif re.match(r"[A-Za-z_]", token):
                if re.match(r"\w", self._token[i + 1]):
                    return False
                i += 1
            else:
                return False
        return self._token[end - 1] == ")"
