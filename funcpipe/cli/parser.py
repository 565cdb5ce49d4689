"""The command line as a whole: its verbs, in the order in which they are used."""

import argparse
from collections.abc import Sequence
from typing import Any

from funcpipe.cli.completion import add_completion
from funcpipe.cli.deploy_arguments import add_deploy, add_destroy, add_logs
from funcpipe.cli.evaluate_options import add_evaluate, add_predict
from funcpipe.cli.history_options import add_history
from funcpipe.cli.options import HelpFormatter
from funcpipe.cli.plan_options import add_explain, add_optimize, add_profile, add_simulate
from funcpipe.cli.platform_options import add_platforms
from funcpipe.cli.provision_options import add_fit_loss, add_provision
from funcpipe.cli.report_options import add_compare, add_report
from funcpipe.cli.run_options import add_clean, add_export, add_key, add_status, add_stop
from funcpipe.cli.server_options import add_train_server
from funcpipe.cli.train_options import add_train, add_verify
from funcpipe.cli.watch_options import add_watch
from funcpipe.core.streams import write_out

_EPILOG = """\
example:
  funcpipe profile my_model:make --sample my_model:inputs --platform local -o profile.json
  funcpipe optimize profile.json --global-batch 128 --time-value 3.84 -o plan.json
  funcpipe train my_model:make --plan plan.json --data my_model:data --epochs 3

Every verb reads and writes JSON files; `funcpipe VERB --help` lists its options.
Exit code: 0 done, 1 a run failed, 2 bad input."""


class _Version(argparse.Action):
    """An action that prints the version, which is read only then."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        from funcpipe import __version__

        write_out(f"funcpipe {__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; `run` of what it returns is the function to call with it."""
    parser = argparse.ArgumentParser(
        prog="funcpipe",
        usage="funcpipe VERB [options]",
        description="Train PyTorch models on serverless functions: profile, optimize, simulate, train, report.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", prog="funcpipe")
    for add in (
        *(add_profile, add_optimize, add_explain, add_simulate, add_train, add_verify, add_evaluate, add_predict),
        *(add_provision, add_fit_loss, add_train_server, add_history),
        *(add_status, add_watch, add_stop, add_clean, add_export, add_key, add_report, add_compare, add_platforms),
        *(add_deploy, add_destroy, add_logs, add_completion),
    ):
        add(verbs)
    return parser
