"""`completion`: the script by which a shell completes verbs and options."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    For bash, put `eval "$(grabstream completion bash)"` into ~/.bashrc; for zsh, the same with zsh into
    ~/.zshrc; for fish, write the script to ~/.config/fish/completions/grabstream.fish.
    """
    context = click.get_current_context().find_root()
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(context.command, {}, "grabstream", "_GRABSTREAM_COMPLETE").source())
