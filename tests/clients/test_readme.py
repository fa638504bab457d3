"""The README's examples that call the API, as they are printed there."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_tools_and_schemas(url, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "pydantic_function_tool" in block]
    said = re.findall(r"print\(.*\)  # (.*)", example)
    exec(compile(example.replace("http://127.0.0.1:8000/v1", url), "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.splitlines() == said
