if __name__ != "autopiper.costmodel":
    raise ImportError("import this as autopiper.costmodel, not as costmodel: the folder is linked into the package")
