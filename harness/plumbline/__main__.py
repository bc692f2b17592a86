"""``python -m plumbline`` is the command ``plumbline``."""

import sys

from plumbline.cli.main import main

sys.exit(main())
