"""The paper again: every table and figure, one command each. A cell is one configuration and one JSON file."""
