"""The side of smddp that needs torch. This package imports nothing by itself."""
