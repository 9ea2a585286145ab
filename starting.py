"""Says on a terminal that a script is starting: importing torch takes seconds, and many on a cold disk.

A script imports this file before anything else. The line disappears with the first output.
"""

import os
import sys

import console

# A user's own script may import one of these, and then nothing is shown.
SCRIPTS = ("classifier.py", "multitask_classifier.py", "pretrain.py", "teacher.py")

if os.path.basename(sys.argv[0]) in SCRIPTS and os.environ.get("RANK", "0") == "0":  # RANK: set by torchrun
    console.show("starting")
