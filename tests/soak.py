"""How often tests of attack and bad luck repeat: a few times, or with SOAK=1 as often as
`scripts/test soak` wants.
"""

import os


def times(few: int, many: int) -> int:
    return max(few, round(many * float(os.environ.get("SOAK", "0"))))
