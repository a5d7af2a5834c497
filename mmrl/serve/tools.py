"""Tools of requests by the names under which scripts outside of mmrl import them; deleted at the first release."""

from mmrl.models.replies import callable_tools
from mmrl.models.replies import message_of as read_message

__all__ = ["callable_tools", "read_message"]
