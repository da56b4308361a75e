"""The log of fompi: `logging.getLogger("fompi")`. A program that configures `logging` sees all of it.

    import logging
    logging.basicConfig(format="%(name)s %(message)s")
    logging.getLogger("fompi").setLevel(logging.DEBUG)

INFO: communicators, and schedules that were chosen by measuring. DEBUG: each plan that is made for a call. WARNING:
what failed that is not the work of the program; without any configuration these are seen, too. Nothing is logged in a
call whose plan exists.
"""

import logging

log = logging.getLogger("fompi")
