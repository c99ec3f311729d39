"""See ``spipe.runtime``; this folder is linked into the package and is never imported by its bare name."""

if __name__ != "spipe.runtime":
    raise ImportError("import this package as spipe.runtime, not as a top-level package named runtime")
