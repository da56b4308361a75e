"""Is a schedule that another system wrote right? python tools/check FILE ... (`check_files.py` says what it finds)"""

import sys

from check_files import main

sys.exit(main())
