# Made from `_NAMES` in __init__.py by `python -m scripts.generated`.
from grabstream.client.exchange import RequestProblem as RequestProblem
from grabstream.client.following import ServedEvent as ServedEvent
from grabstream.client.following import StreamReset as StreamReset
from grabstream.client.following import WaitingPosition as WaitingPosition
from grabstream.client.over_http import AsyncClient as AsyncClient
from grabstream.client.over_http import Client as Client
from grabstream.client.over_kafka import KafkaClient as KafkaClient
from grabstream.client.over_kafka import SyncKafkaClient as SyncKafkaClient
from grabstream.connections.event_sources import NoTrail as NoTrail
from grabstream.connections.opening import open_gate as open_gate
from grabstream.extras import MissingExtra as MissingExtra
from grabstream.gate.gate import Gate as Gate
from grabstream.models.answers import Answer as Answer
from grabstream.models.answers import LimitState as LimitState
from grabstream.models.answers import decode_answer as decode_answer
from grabstream.models.commands import Adjust as Adjust
from grabstream.models.commands import Amend as Amend
from grabstream.models.commands import AnyCommand as AnyCommand
from grabstream.models.commands import Close as Close
from grabstream.models.commands import Confirm as Confirm
from grabstream.models.commands import Extend as Extend
from grabstream.models.commands import Grab as Grab
from grabstream.models.commands import Load as Load
from grabstream.models.commands import Open as Open
from grabstream.models.commands import Pause as Pause
from grabstream.models.commands import Redeem as Redeem
from grabstream.models.commands import Release as Release
from grabstream.models.commands import Resume as Resume
from grabstream.models.commands import Return as Return
from grabstream.models.commands import Undecodable as Undecodable
from grabstream.models.commands import Unredeem as Unredeem
from grabstream.models.commands import check as check_command
from grabstream.models.commands import decode_command as decode_command
from grabstream.models.commands import encode_command as encode_command
from grabstream.models.entries import Entry as Entry
from grabstream.models.events import AnyEvent as AnyEvent
from grabstream.models.events import AnyGrabEvent as AnyGrabEvent
from grabstream.models.events import CampaignZone as CampaignZone
from grabstream.models.events import GrabConfirmed as GrabConfirmed
from grabstream.models.events import GrabExtended as GrabExtended
from grabstream.models.events import GrabGranted as GrabGranted
from grabstream.models.events import GrabHeld as GrabHeld
from grabstream.models.events import GrabQueued as GrabQueued
from grabstream.models.events import GrabRedeemed as GrabRedeemed
from grabstream.models.events import GrabReleased as GrabReleased
from grabstream.models.events import GrabReturned as GrabReturned
from grabstream.models.events import GrabUnredeemed as GrabUnredeemed
from grabstream.models.events import LedgerAdjusted as LedgerAdjusted
from grabstream.models.events import OfferAmended as OfferAmended
from grabstream.models.events import OfferClosed as OfferClosed
from grabstream.models.events import OfferLoaded as OfferLoaded
from grabstream.models.events import OfferOpened as OfferOpened
from grabstream.models.events import OfferPaused as OfferPaused
from grabstream.models.events import OfferResumed as OfferResumed
from grabstream.models.events import OfferRetired as OfferRetired
from grabstream.models.events import PaymentRefundDue as PaymentRefundDue
from grabstream.models.events import decode_event as decode_event
from grabstream.models.identifiers import campaign_of as campaign_of
from grabstream.models.identifiers import shard_of as shard_of
from grabstream.models.journal import Corrupt as Corrupt
from grabstream.models.journal import Gap as Gap
from grabstream.models.money import Invalid as Invalid
from grabstream.models.offers import Changes as Changes
from grabstream.models.offers import CouponTerms as CouponTerms
from grabstream.models.offers import EnvelopeTerms as EnvelopeTerms
from grabstream.models.offers import Hours as Hours
from grabstream.models.offers import Limit as Limit
from grabstream.models.offers import StockTerms as StockTerms
from grabstream.models.offers import Terms as Terms
from grabstream.models.outcomes import Outcome as Outcome
from grabstream.models.outcomes import OutcomeUnknown as OutcomeUnknown
from grabstream.models.pseudonyms import pseudonym as pseudonym
from grabstream.models.runs import AnyLine as AnyLine
from grabstream.models.runs import GrantedRun as GrantedRun
from grabstream.models.runs import HeldRun as HeldRun
from grabstream.models.runs import decode_line as decode_line
from grabstream.models.runs import singles as singles
from grabstream.models.transfers import Transfer as Transfer
from grabstream.models.upcasting import NewerEvent as NewerEvent
from grabstream.ops.event_cursor import EventCursor as EventCursor
from grabstream.ops.following import follow_into as follow_into
from grabstream.ops.history import JournalLine as JournalLine
from grabstream.ops.history import read_events as read_events
from grabstream.ops.history import read_events_sync as read_events_sync
from grabstream.ops.history import read_lines as read_lines
from grabstream.ops.history import read_lines_sync as read_lines_sync
from grabstream.projections.cursors import CursorMoved as CursorMoved
from grabstream.projections.cursors import Fact as Fact
from grabstream.settings import BadSettings as BadSettings
from grabstream.settings import Settings as Settings
from grabstream.settings import load_settings as load_settings
from grabstream.streams.following.sinks import EventSink as EventSink
from grabstream.streams.following.sinks import FileSink as FileSink
from grabstream.streams.following.sinks import SinkDamaged as SinkDamaged
from grabstream.streams.following.user_projection import Projection as Projection
from grabstream.streams.history.chunks import Point as Point

__all__ = [
    "Adjust",
    "Amend",
    "Answer",
    "AnyCommand",
    "AnyEvent",
    "AnyGrabEvent",
    "AnyLine",
    "AsyncClient",
    "BadSettings",
    "CampaignZone",
    "Changes",
    "Client",
    "Close",
    "Confirm",
    "Corrupt",
    "CouponTerms",
    "CursorMoved",
    "Entry",
    "EnvelopeTerms",
    "EventCursor",
    "EventSink",
    "Extend",
    "Fact",
    "FileSink",
    "Gap",
    "Gate",
    "Grab",
    "GrabConfirmed",
    "GrabExtended",
    "GrabGranted",
    "GrabHeld",
    "GrabQueued",
    "GrabRedeemed",
    "GrabReleased",
    "GrabReturned",
    "GrabUnredeemed",
    "GrantedRun",
    "HeldRun",
    "Hours",
    "Invalid",
    "JournalLine",
    "KafkaClient",
    "LedgerAdjusted",
    "Limit",
    "LimitState",
    "Load",
    "MissingExtra",
    "NewerEvent",
    "NoTrail",
    "OfferAmended",
    "OfferClosed",
    "OfferLoaded",
    "OfferOpened",
    "OfferPaused",
    "OfferResumed",
    "OfferRetired",
    "Open",
    "Outcome",
    "OutcomeUnknown",
    "Pause",
    "PaymentRefundDue",
    "Point",
    "Projection",
    "Redeem",
    "Release",
    "RequestProblem",
    "Resume",
    "Return",
    "ServedEvent",
    "Settings",
    "SinkDamaged",
    "StockTerms",
    "StreamReset",
    "SyncKafkaClient",
    "Terms",
    "Transfer",
    "Undecodable",
    "Unredeem",
    "WaitingPosition",
    "campaign_of",
    "check_command",
    "decode_answer",
    "decode_command",
    "decode_event",
    "decode_line",
    "encode_command",
    "follow_into",
    "load_settings",
    "open_gate",
    "pseudonym",
    "read_events",
    "read_events_sync",
    "read_lines",
    "read_lines_sync",
    "shard_of",
    "singles",
]
