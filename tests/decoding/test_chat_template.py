"""Conversations as text."""

import pytest

from spmd_tasks.decoding import ChatTemplate


@pytest.mark.parametrize(
  'settings, expected',
  [
    ({}, 'system: be brief\nuser: {role} {x}\nassistant: '),
    ({'turn': '<{role}>{content}</>', 'reply': '<assistant>'}, '<system>be brief</><user>{role} {x}</><assistant>'),
  ],
)
def test_what_a_message_says_is_never_taken_for_the_template(settings, expected):
  assert ChatTemplate(**settings).render([('system', 'be brief'), ('user', '{role} {x}')]) == expected


@pytest.mark.parametrize('turn', ['', '{role}', '{content}', '{content} by {role}'])
def test_a_turn_has_a_role_and_then_a_content(turn):
  with pytest.raises(ValueError, match='turn='):
    ChatTemplate(turn=turn)
