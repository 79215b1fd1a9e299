"""Train with verifiable rewards: python examples/start_rlvr_pipeline.py --config-name tiny_grpo [key=value ...]"""

import sys

from roll_lite.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
