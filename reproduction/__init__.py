"""The paper's tables and figures, one command each: a study on top of the package, run from the repository's root.

A cell is one configuration and one JSON file.
"""
