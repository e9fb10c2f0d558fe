"""Reports about one program: collect the data, draw the figures, render the page.

Data: data.py, predictions.py. Collecting: gather.py, collect.py, attention.py, embeddings.py, tokens.py, speed.py.
Figures: plots.py, embedding_plots.py, maps.py, svg.py. Page: page.py, template.html. Detectors: detector.py, detector_plots.py,
detector_page.py, detector.html. All pages: frame.py, base.html.
"""

MISSING = "report: needs jinja2, which is not installed. Run `pip install 'fqvit[report]'`."
