"""The runtime: one interpreter of Programs on torch.distributed, and what launches it."""

if __name__ != "autopiper.runtime":
    raise ImportError("import this as autopiper.runtime, not as runtime: the folder is linked into the package")
