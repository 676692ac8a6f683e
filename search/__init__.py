"""How to train it: bounds, patterns, ILPs and the Bayesian search around them. Never imports torch."""

if __name__ != "autopiper.search":
    raise ImportError("import this as autopiper.search, not as search: the folder is linked into the package")

from autopiper.search.funnel import search

__all__ = ["search"]
