"""See ``spipe.sim``; this folder is linked into the package and is never imported by its bare name."""

if __name__ != "spipe.sim":
    raise ImportError("import this package as spipe.sim, not as a top-level package named sim")
