"""
What `spark-submit` runs: the commands of `tieringd spark`, with the arguments that follow the file.

`tieringd spark submit-file` prints where it is.
"""

import sys

from tieringd.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["spark"]
    main()
