"""The program of python/README.md runs, and each call gives what the comment behind it says."""

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "README.md"


def test_the_program_does_what_it_says() -> None:
    (program,) = re.findall(r"```python[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines, names, checked = program.splitlines(), {}, 0
    for statement in ast.parse(program).body:
        code = ast.unparse(statement)
        said = re.search(r"# (\d+):", lines[(statement.end_lineno or 1) - 1])
        if isinstance(statement, ast.Expr) and said:
            assert eval(code, names) == int(said[1]), code
            checked += 1
        else:
            exec(code, names)
    assert checked == 2
