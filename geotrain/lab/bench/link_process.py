"""One end of a measured link, as a process: `link_process PLAN_JSON`.

Prints {"port": N} once it listens; the leading end then prints the figures of both.
"""

import asyncio
import json
import sys

from geotrain.errors import GeotrainError
from geotrain.lab.bench.link_end import End
from geotrain.lab.bench.link_options import EndPlan

CONNECT_LIMIT_S = 60.0


def _say(record: object) -> None:
    print(json.dumps(record), flush=True)


def main() -> None:
    plan = EndPlan.from_json(sys.argv[1])
    end = End(plan)
    try:
        figures = asyncio.run(
            end.run(connect_limit_s=CONNECT_LIMIT_S, on_listening=lambda port: _say({"port": port}))
        )
    except GeotrainError as error:
        sys.exit(str(error))
    if plan.index == 0:
        _say(figures)


if __name__ == "__main__":
    main()
