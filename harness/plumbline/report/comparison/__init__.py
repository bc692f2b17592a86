"""Two runs, or the parts of one, compared: outcomes first, then figures. Pure: nothing is started here.

Aligning, weighing and writing a comparison belong here; the tests behind it are in ``plumbline.statistics``.
"""
