"""A report about one program: what was measured, as values (data.py, answers.py), how it is gathered (collect.py, gather.py),
pictures of it (plots.py, maps.py) and the page (page.py). Nothing here changes a program."""

MISSING = "report: needs jinja2, which is not installed. Run `pip install 'fqvit[report]'`."
