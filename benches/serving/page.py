"""The figures of a run as a table: of Markdown, and on a page of its own."""

import html

COLUMNS = {
    "first_p50_ms": "first token p50, ms",
    "first_p95_ms": "p95, ms",
    "total_p50_ms": "answer p50, ms",
    "computed": "prompt tokens computed",
    "hits": "hit tokens",
    "scheduler_cpu_ms": "scheduler, CPU ms",
    "process_cpu_s": "process, CPU s",
}

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color-scheme:light dark}
table{border-collapse:collapse;width:100%}td,th{padding:.4rem .6rem;border-bottom:1px solid #8884;text-align:right}
th{font-weight:600}td:first-child,th:first-child,td.wide{text-align:left}.bar{height:.5rem;background:#4a7dbd;margin-top:.2rem}"""


def cells(row: dict) -> list[str]:
    if "absent" in row:
        return [row["absent"], *[""] * (len(COLUMNS) - 1)]
    shown = row | {"hits": ", ".join(f"{tier} {tokens:,}" for tier, tokens in row["hits"].items()) or "0"}
    return [f"{value:,}" if isinstance(value := shown[name], int | float) else value for name in COLUMNS]


def markdown(figures: dict) -> str:
    lines = [["served by", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    lines += [[name, *cells(row)] for name, row in figures["served_by"].items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(figures: dict) -> str:
    rows = figures["served_by"]
    longest = max((row.get("first_p50_ms", 0) for row in rows.values()), default=0) or 1
    head = "".join(f"<th>{title}</th>" for title in ["served by", *COLUMNS.values()])
    body = "".join(f"<tr>{_row(name, row, longest)}</tr>" for name, row in rows.items())
    about = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures["run"].items())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Turns of conversations</title><style>{STYLE}</style>"
        f"<h1>Turns of conversations</h1><p>{html.escape(about)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>\n"
    )


def _row(name: str, row: dict, longest: float) -> str:
    if "absent" in row:
        return f"<td>{html.escape(name)}</td><td class=wide colspan={len(COLUMNS)}>{html.escape(row['absent'])}</td>"
    first, *rest = (html.escape(cell) for cell in cells(row))
    bar = f"<div class=bar style='width:{100 * row['first_p50_ms'] / longest:.0f}%'></div>"
    return f"<td>{html.escape(name)}</td><td>{first}{bar}</td>" + "".join(f"<td>{cell}</td>" for cell in rest)
