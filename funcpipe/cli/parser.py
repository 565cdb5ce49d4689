"""The command line as a whole: its verbs, in the order in which they are used."""

import argparse
import itertools

from funcpipe.cli.completion import add_completion
from funcpipe.cli.deploy_arguments import add_deploy, add_destroy, add_logs
from funcpipe.cli.evaluate_options import add_evaluate, add_predict
from funcpipe.cli.history_options import add_history
from funcpipe.cli.job_file import verbs_of
from funcpipe.cli.options import PrintAndExit, Verb
from funcpipe.cli.plan_options import add_explain, add_optimize, add_profile, add_simulate
from funcpipe.cli.platform_options import add_platforms
from funcpipe.cli.provision_options import add_fit_loss, add_provision
from funcpipe.cli.report_options import add_compare, add_report
from funcpipe.cli.run_options import add_clean, add_export, add_key, add_status, add_stop
from funcpipe.cli.server_options import add_train_server
from funcpipe.cli.train_options import add_train, add_verify
from funcpipe.cli.watch_options import add_watch

_GROUPS = {
    "start here": (add_profile, add_optimize, add_train),
    "plans": (add_explain, add_simulate, add_verify, add_report, add_compare, add_history),
    "models": (add_evaluate, add_predict, add_export),
    "runs": (add_status, add_watch, add_logs, add_stop, add_clean, add_key),
    "clouds": (add_platforms, add_deploy, add_destroy),
    "machines": (add_provision, add_fit_loss, add_train_server),
    "shell": (add_completion,),
}
"""The verbs by group, in the order in which the help page lists them."""

_ABOVE = """\
usage: funcpipe VERB [options]

Train PyTorch models on serverless functions: profile, optimize, train.

"""

_BELOW = """
example:
  funcpipe profile my_model:make --sample my_model:inputs --platform local -o profile.json
  funcpipe optimize profile.json --global-batch 128 --time-value 3.84 -o plan.json
  funcpipe train my_model:make --plan plan.json --data my_model:data --epochs 3

`funcpipe VERB --help` lists a verb's options, `funcpipe --version` the version.
Exit code: 0 done, 1 a run failed, 2 bad input.
"""


class _Overview(argparse.ArgumentParser):
    """The parser of all verbs, whose help page fits one screen."""

    def format_help(self) -> str:
        """The verbs by group, each in a line."""
        verbs, lines = iter(verbs_of(self).items()), []
        for group, adds in _GROUPS.items():
            for place, (name, verb) in enumerate(itertools.islice(verbs, len(adds))):
                lines.append(f"  {'' if place else group:10}  {name:12}  {verb.summary}\n")
        return "".join([_ABOVE, *lines, _BELOW])


def _version(_: object) -> str:
    from funcpipe import __version__

    return f"funcpipe {__version__}"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; `run` of what it returns is the function to call with it."""
    parser = _Overview(prog="funcpipe", usage="funcpipe VERB [options]")
    parser.add_argument("--version", action=PrintAndExit, page=_version, help="print the version")
    verbs = parser.add_subparsers(required=True, metavar="VERB", prog="funcpipe", parser_class=Verb)
    for add in itertools.chain(*_GROUPS.values()):
        add(verbs)
    return parser
