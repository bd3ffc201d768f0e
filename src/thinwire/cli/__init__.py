"""The command line: one file per verb. Bad input is one line and exit code 2."""

from __future__ import annotations

import sys

import click

from thinwire.cli.compare import compare
from thinwire.cli.lab import lab
from thinwire.cli.methods import methods
from thinwire.cli.train import train
from thinwire.errors import ExchangeError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def app() -> None:
    """Train over a thin wire: data-parallel PyTorch that communicates 10 to 1000 times less.

    \b
    Examples:
      thinwire methods
      thinwire train acp:rank=4 --workload image --workers 2 --steps 200
      thinwire lab --hosts 4 --rate 100mbit -- thinwire train acp:rank=4
      thinwire compare ddp local acp:rank=4 --hosts 4 --rate 100mbit --report report.html
    """


app.add_command(compare)
app.add_command(lab)
app.add_command(methods)
app.add_command(train)


def main() -> None:
    try:
        code = app.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = 2
    except click.ClickException as error:
        code = _complain(error.format_message(), 2)
    except ValueError as error:
        code = _complain(str(error), 2)
    except ExchangeError as error:
        code = _complain(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        code = _complain("interrupted", 130)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    print(f"thinwire: {' '.join(message.split())}", file=sys.stderr)
    return code
