"""Prints what the build needs to know about the torch of the running interpreter, one fact a line."""

import sys
import sysconfig

SUPPORTED_MINORS = range(11, 16)


def main() -> None:
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        sys.exit(
            f"{sys.executable} cannot import torch ({error}). smddp is built for one torch: install "
            "it first, then run `pip install --no-build-isolation .`"
        )
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if major != 2 or minor not in SUPPORTED_MINORS:
        first, last = SUPPORTED_MINORS[0], SUPPORTED_MINORS[-1]
        sys.exit(
            f"torch {torch.__version__} is not supported: smddp builds against torch 2.{first} to "
            f"2.{last}. Install one of those and build again."
        )
    if not torch.distributed.is_available():
        sys.exit(f"torch {torch.__version__} of {sys.executable} was built without torch.distributed")
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    print(torch.__version__)
    print(sysconfig.get_config_var("EXT_SUFFIX"))
    print("|".join(dict.fromkeys(includes)))
    print("|".join(cpp_extension.library_paths()))


if __name__ == "__main__":
    main()
