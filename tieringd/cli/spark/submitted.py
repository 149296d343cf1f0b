"""
The program that `spark-submit` runs: `tieringd spark` with the arguments that follow this file.

`tieringd spark submit-file` prints the path of this file.
"""

import sys

from tieringd.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["spark"]
    main()
