"""A run's folder → figures, tables, one self-contained page, the live page. It never asks which engine made the run."""
