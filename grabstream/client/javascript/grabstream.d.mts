// Types of grabstream.mjs. Times are milliseconds since 1970 UTC; amounts count minor units or pieces.
// Made from the models by `python -m scripts.generated`, up to the line of dashes.

/** Below 20: the command was executed, and an event records it. From 20: it was refused, and changed
 *  nothing. */
export type Outcome =
  | 'granted' | 'held' | 'confirmed' | 'released' | 'returned' | 'opened' | 'amended' | 'closed' | 'paused'
  | 'resumed' | 'extended' | 'redeemed' | 'unredeemed' | 'loaded' | 'adjusted' | 'waiting' | 'invalid'
  | 'fenced' | 'busy' | 'conflict' | 'no_such_offer' | 'no_such_grab' | 'already_taken' | 'not_open_yet'
  | 'on_hold' | 'over' | 'not_eligible' | 'limit_reached' | 'sold_out' | 'not_enough_left' | 'expired'
  | 'not_held' | 'not_redeemable'

/** The answer to one command. `user` is the user that the command names, always for a grab: it is
 *  identified by `offer`, `user` and `id`. `code` is the number of `outcome`. `amount` counts the offer's
 *  asset (minor units or pieces), `place` is the ordinal of the grab within the offer, from 1, `left` the
 *  parts or pieces that can be taken after it. `seq` is the event's number in `shard`. `due` minor units
 *  of `currency` are to be paid until `deadline_at`. `limit` is the limit that refused the command,
 *  `limits` what all limits leave. `retry_at`, `deadline_at` and `at` are milliseconds since 1970 UTC.
 *  `voided_codes` are the codes of returned units, which are void. `metadata` is that of a grab that was
 *  granted, held or queued. */
export interface Answer {
  id: string
  outcome: Outcome
  code: number
  offer?: string
  user?: string
  grab?: string
  amount?: number
  quantity?: number
  place?: number
  left?: number
  repeated?: boolean
  retry_at?: number
  shard?: number
  seq?: number
  at?: number
  message?: string
  deadline_at?: number
  due?: number
  currency?: string
  limit?: LimitState
  limits?: LimitState[]
  coupon_code?: string
  coupon_codes?: string[]
  voided_codes?: string[]
  metadata?: Record<string, string>
  /** Of a hold, if the gateway has payment keys: what the buyer takes to the payment side. */
  payment_token?: string
}

/** What `amend` changes; an absent field stays as it is. An envelope's money and parts are promised and
 *  cannot be changed. `randomness` is `<round>/<randomness>/<signature>` of the awaited round. */
export interface Changes {
  title?: string
  total?: number
  opens_at?: number
  closes_at?: number
  limits?: Limit[]
  max_per_grab?: number
  price?: number
  hold_ms?: number
  extensions?: number
  late?: 'grace' | 'refuse' | 'retake'
  grace_ms?: number
  return_restores?: boolean
  valid_until?: number
  randomness?: string
}

/** Coupons: units with limits, used by `redeem`. */
export interface CouponTerms {
  kind: 'coupon'
  /** who gives the offer; gets back what no one takes */
  issuer: string
  /** one line of text for people */
  title?: string
  /** size of the offer, in minor units or pieces */
  total: number
  /** grabs before are `not_open_yet`; absent: at once */
  opens_at?: number
  /** closes automatically then; absent: 24 h after opening (envelope), never (coupon, stock) */
  closes_at?: number
  /** the time zone for `limits` and `hours` */
  timezone?: string
  /** `{weekdays, from, until}`: outside of these hours grabs are `not_open_yet`; absent: always open */
  hours?: Hours[]
  /** who may grab: `everyone`, the users of a loaded `list`, or users with a signed `ticket` */
  audience?: 'everyone' | 'list' | 'ticket'
  /** how long an offer stays in Redis after its close (at least until `valid_until`); its id is never used
   *  again */
  retire_after_ms?: number
  /** `{by, per, max, scope}`: by `user` or an attribute, per `offer`, `hour`, `day` or `week` */
  limits?: Limit[]
  /** the greatest `quantity` of one grab */
  max_per_grab?: number
  /** `all` of the quantity or nothing, or `up_to` what is left */
  take?: 'all' | 'up_to'
  /** of one unit, minor units of `currency`; needs `hold_ms` */
  price?: number
  /** of `price` */
  currency?: string
  /** how long a grab is held for `confirm`; absent: granted at once */
  hold_ms?: number
  /** how often a hold may be extended by `hold_ms` */
  extensions?: number
  /** a payment after the deadline: `refuse` it, accept it within the `grace` time (units stay held), or
   *  `retake` units if some are left */
  late?: 'grace' | 'refuse' | 'retake'
  /** with `late: grace`, how long after the deadline */
  grace_ms?: number
  /** whether a return gives the user's limits back */
  return_restores?: boolean
  /** last time to redeem; absent: no end */
  valid_until?: number
  /** whether users may join a waiting list when it is sold out */
  waiting_list?: boolean
  /** if true, grabs are `not_open_yet` until there is a code for each unit */
  codes?: boolean
}

/** A sum of money in random parts, one for each user. */
export interface EnvelopeTerms {
  kind: 'envelope'
  /** who gives the offer; gets back what no one takes */
  issuer: string
  /** one line of text for people */
  title?: string
  /** size of the offer, in minor units or pieces */
  total: number
  /** grabs before are `not_open_yet`; absent: at once */
  opens_at?: number
  /** closes automatically then; absent: 24 h after opening (envelope), never (coupon, stock) */
  closes_at?: number
  /** the time zone for `limits` and `hours` */
  timezone?: string
  /** `{weekdays, from, until}`: outside of these hours grabs are `not_open_yet`; absent: always open */
  hours?: Hours[]
  /** who may grab: `everyone`, the users of a loaded `list`, or users with a signed `ticket` */
  audience?: 'everyone' | 'list' | 'ticket'
  /** how long an offer stays in Redis after its close (at least until `valid_until`); its id is never used
   *  again */
  retire_after_ms?: number
  /** id of the payment that funded the offer */
  funding: string
  /** the currency, such as CNY */
  asset: string
  /** how many parts */
  parts: number
  /** `double_mean` (min … twice the mean), `bounded` (as wide as `min` and `max` allow), `equal` */
  law?: 'bounded' | 'double_mean' | 'equal'
  /** the smallest part */
  min?: number
  /** the greatest part; only with law `bounded` */
  max?: number
  /** `ahead` (parts drawn and shuffled at opening) or `at_grab` */
  draw?: 'ahead' | 'at_grab'
  /** 16 to 64 bytes in hex from which all parts follow; absent: the gate draws it. Refused unless
   *  `GRAB_ISSUER_SEEDS=true` */
  seed?: string
  /** `<chain>/<round>` of a public randomness beacon, a round that is not due yet; with `draw: at_grab`.
   *  Grabs are `not_open_yet` until `amend` gives its `randomness`, from which the parts follow too */
  beacon?: string
}

/** Hours of the week in which an offer takes grabs, by the offer's local clock: from `from` up to, not
 *  including, `until`; both as `HH:MM`, at most 24:00. */
export interface Hours {
  weekdays?: ('fri' | 'mon' | 'sat' | 'sun' | 'thu' | 'tue' | 'wed')[]
  from?: string
  until?: string
}

/** At most `max` units by one user (or by one value of the attribute `by`) in each hour, day or week, or
 *  in the whole offer. With `scope` campaign, grabs of all offers of the campaign count that have the same
 *  limit. */
export interface Limit {
  by: string
  per: 'day' | 'hour' | 'offer' | 'week'
  max: number
  scope?: 'campaign' | 'offer'
}

/** What a limit leaves to a user: `left` of `max` units until `resets_at` (milliseconds since 1970 UTC;
 *  absent: the limit never resets). */
export interface LimitState {
  by: string
  per: 'offer' | 'hour' | 'day' | 'week'
  max: number
  left: number
  resets_at?: number
  scope?: 'offer' | 'campaign'
}

/** Stock: items in any quantity; with `hold_ms`, held until paid. */
export interface StockTerms {
  kind: 'stock'
  /** who gives the offer; gets back what no one takes */
  issuer: string
  /** one line of text for people */
  title?: string
  /** size of the offer, in minor units or pieces */
  total: number
  /** grabs before are `not_open_yet`; absent: at once */
  opens_at?: number
  /** closes automatically then; absent: 24 h after opening (envelope), never (coupon, stock) */
  closes_at?: number
  /** the time zone for `limits` and `hours` */
  timezone?: string
  /** `{weekdays, from, until}`: outside of these hours grabs are `not_open_yet`; absent: always open */
  hours?: Hours[]
  /** who may grab: `everyone`, the users of a loaded `list`, or users with a signed `ticket` */
  audience?: 'everyone' | 'list' | 'ticket'
  /** how long an offer stays in Redis after its close (at least until `valid_until`); its id is never used
   *  again */
  retire_after_ms?: number
  /** `{by, per, max, scope}`: by `user` or an attribute, per `offer`, `hour`, `day` or `week` */
  limits?: Limit[]
  /** the greatest `quantity` of one grab */
  max_per_grab?: number
  /** `all` of the quantity or nothing, or `up_to` what is left */
  take?: 'all' | 'up_to'
  /** of one unit, minor units of `currency`; needs `hold_ms` */
  price?: number
  /** of `price` */
  currency?: string
  /** how long a grab is held for `confirm`; absent: granted at once */
  hold_ms?: number
  /** how often a hold may be extended by `hold_ms` */
  extensions?: number
  /** a payment after the deadline: `refuse` it, accept it within the `grace` time (units stay held), or
   *  `retake` units if some are left */
  late?: 'grace' | 'refuse' | 'retake'
  /** with `late: grace`, how long after the deadline */
  grace_ms?: number
  /** whether a return gives the user's limits back */
  return_restores?: boolean
  /** last time to redeem; absent: no end */
  valid_until?: number
  /** whether users may join a waiting list when it is sold out */
  waiting_list?: boolean
  /** what is counted; absent: `sku:<offer>` */
  asset?: string
}

export type Terms =
  | EnvelopeTerms | CouponTerms | StockTerms

/** A command of an operator about an offer; `operator` says who sent it, `approvals` are the signatures of
 *  the operators who approve it. */
export interface OperatorFields {
  operator?: string
  approvals?: string[]
}

/** One user's attempt to get `quantity` units. `attributes` are names and values that limits may count by,
 *  `ticket` is a signed token of the eligibility service. The grabs of one array that share a `basket` are
 *  all granted or all refused. With `wait`, the user joins the waiting list when the offer is sold out.
 *  `metadata` are texts by name that the answer and the events of the grab repeat; nothing is decided by
 *  them. */
export interface GrabFields {
  /** how many units */
  quantity?: number
  /** names and values that limits may count by, such as card=c1 */
  attributes?: Record<string, string>
  /** the ticket that the eligibility service signed */
  ticket?: string
  /** join the waiting list when the offer is sold out */
  wait?: boolean
  /** texts by name that the answer and the events of the grab repeat, such as form_id=f1 */
  metadata?: Record<string, string>
}

/** Reports that a hold was paid: `paid` minor units of `currency` by `payment`, for `quantity` of its
 *  units (absent: all that are held). `receipt` is the signature of the payment side. */
export interface ConfirmFields {
  /** the payment's id; a payment is booked only once */
  payment?: string
  /** the amount paid, in minor units of the currency */
  paid?: number
  /** the currency of the payment, such as CNY */
  currency?: string
  /** how many of the held units to confirm; absent: all */
  quantity?: number
  /** the receipt that the payment side signed */
  receipt?: string
}

/** Gives back `quantity` units (absent: all) that were granted or confirmed; money paid for them goes
 *  back. */
export interface ReturnFields {
  /** how many units; absent: all that are not redeemed */
  quantity?: number
  /** the reason, in one line */
  reason?: string
}

/** Uses `quantity` units of a coupon, once for each order. */
export interface RedeemFields {
  /** how many units */
  quantity?: number
}

/** What a user has of an asset, and what is held for them. */
export interface Balance {
  asset: string
  available: number | bigint
  held: number | bigint
}

/** Balances of a user, by asset. */
export interface BalancePage {
  next?: string
  balances: Balance[]
}

/** An offer with its terms. The seed of an envelope is there when it has closed. */
export interface OfferDetail {
  offer: string
  kind: 'envelope' | 'coupon' | 'stock'
  issuer: string
  title: string
  asset: string
  state: 'open' | 'paused' | 'closed' | 'retired'
  total: number
  units: number
  units_left: number
  amount_left: number
  grabs: number
  given: number
  held: number
  waiting: number
  refunded: number
  opened_at: number
  opens_at: number
  /** Absent: it does not close automatically. */
  closes_at?: number
  closed_at?: number
  retired_at?: number
  /** Why it was closed: command, deadline, or drained. */
  reason?: string
  shard: number
  terms: Terms
  seed_sha256?: string
  seed?: string
}

/** A page of offers. */
export interface OfferPage {
  next?: string
  offers: Offer[]
}

/** An offer in a list. `total` and amounts count minor units (envelope) or pieces, `units` parts or
 *  pieces. */
export interface Offer {
  offer: string
  kind: 'envelope' | 'coupon' | 'stock'
  issuer: string
  title: string
  asset: string
  state: 'open' | 'paused' | 'closed' | 'retired'
  total: number
  units: number
  units_left: number
  amount_left: number
  grabs: number
  given: number
  held: number
  waiting: number
  refunded: number
  opened_at: number
  opens_at: number
  /** Absent: it does not close automatically. */
  closes_at?: number
  closed_at?: number
  retired_at?: number
  /** Why it was closed: command, deadline, or drained. */
  reason?: string
}

/** Who got what. `held`, `taken` and `redeemed` are units of the `quantity`. */
export interface Taken {
  place: number
  user: string
  grab: string
  state: 'held' | 'waiting' | 'confirmed' | 'granted' | 'released' | 'expired' | 'returned'
  quantity: number
  amount: number
  asset: string
  held: number
  taken: number
  redeemed: number
  at: number
}

/** A page of grabs of an offer. */
export interface TakenPage {
  next?: string
  grabs: Taken[]
}

/** A page of transfers of a user, the newest first. */
export interface TransferPage {
  next?: string
  transfers: UserTransfer[]
}

/** A grab of a user. `back` units were returned, or are still awaited. */
export interface UserGrab {
  offer: string
  grab: string
  state: 'held' | 'waiting' | 'confirmed' | 'granted' | 'released' | 'expired' | 'returned'
  quantity: number
  amount: number
  asset: string
  place: number
  /** On the waiting list; 1 is served next. Told where one offer is asked about. */
  position?: number
  held: number
  taken: number
  redeemed: number
  back: number
  due?: number
  currency?: string
  paid: number
  refunded: number
  deadline_at?: number
  /** Of a hold for which something is due. */
  payment_token?: string
  basket?: string
  /** What the grab was sent with. */
  metadata?: Record<string, string>
  shard: number
  seq: number
  at: number
}

/** A page of grabs of a user, the newest first. */
export interface UserGrabPage {
  next?: string
  grabs: UserGrab[]
}

/** A movement of `amount` of `asset` into a user's account (`wallet`, `hold`), or out of it, with the
 *  account on the other side. */
export interface UserTransfer {
  shard: number
  seq: number
  leg: number
  offer: string
  asset: string
  amount: number
  direction: 'in' | 'out'
  account: 'wallet' | 'hold'
  other: string
  at: number
}

export interface OffersAsked extends PageAsked {
  /** Offers in this state only. */
  state?: 'open' | 'paused' | 'closed' | 'retired'
  /** Offers of this kind only. */
  kind?: 'envelope' | 'coupon' | 'stock'
  /** Offers of this issuer only. */
  issuer?: string
  /** `newest` first, or `random`: always the same for one `visitor`. */
  order?: 'newest' | 'random'
  /** Whose random order it is; required with `order=random`. */
  visitor?: string
}

export interface OfferGrabsAsked extends PageAsked {
  /** By `place`, or the `luckiest` first, by amount. */
  order?: 'place' | 'luckiest'
}

export interface UserGrabsAsked extends PageAsked {
  /** Grabs of this offer only. */
  offer?: string
}

// -----------------------------------------------------------------------------------------------------------

/** `id`: the id of the command; a repeat with the same one gets the first answer. Absent: a new one. */
export interface CommandOptions {
  id?: string
}

export interface OperatorOptions extends CommandOptions, OperatorFields {}

export interface BasketGrab extends GrabFields {
  offer: string
  user: string
}

/** `after`: an answer, or `<shard>-<seq>`, whose event the read model must have. */
export interface AfterAsked {
  after?: Answer | string
}

export interface PageAsked extends AfterAsked {
  limit?: number
  cursor?: string
}

export interface Page {
  next?: string
}

/** The gateway refused a request, or did not serve it in time; no command was decided. */
export class RequestProblem extends Error {
  constructor(status: number, type: string, detail: string, field?: string)
  readonly status: number
  readonly type: string
  readonly detail: string
  readonly field?: string
}

/** The time ran out after a command was sent: it may be decided or not. Send it again with `id`. */
export class OutcomeUnknown extends Error {
  constructor(id: string, words: string)
  readonly id: string
}

/** `after` is the `id` of an event, or 0 for the first event of an offer; absent: what comes next. */
export interface EventsOptions {
  after?: string | 0
  signal?: AbortSignal
}

/** Where a grab stands on its waiting list; 1 is served next. */
export interface WaitingPosition {
  offer: string
  grab: string
  position: number
}

/** `onPosition` is called when a grab of the user stands elsewhere on its waiting list. What it throws ends
 *  the loop. */
export interface UserEventsOptions extends EventsOptions {
  onPosition?: (position: WaitingPosition) => void
}

/** An event; of the type `reset`, `event.reason` says why the stream could not resume. */
export interface StreamedEvent {
  id: string
  type: string
  event: Record<string, unknown>
}

/** A client of a gateway. Every method rejects with RequestProblem or OutcomeUnknown. */
export class Client {
  constructor(url: string | URL, options?: { key?: string; timeoutMs?: number })

  open(terms: Terms, offer?: string, options?: OperatorOptions): Promise<Answer>
  amend(offer: string, changes: Changes, options?: OperatorOptions): Promise<Answer>
  pause(offer: string, options?: OperatorOptions): Promise<Answer>
  resume(offer: string, options?: OperatorOptions): Promise<Answer>
  close(offer: string, options?: OperatorOptions): Promise<Answer>

  grab(offer: string, user: string, more?: GrabFields & CommandOptions): Promise<Answer>
  takeBasket(grabs: BasketGrab[], options?: CommandOptions): Promise<Answer[]>

  confirm(
    offer: string, grab: string, user: string, more?: ConfirmFields & CommandOptions,
  ): Promise<Answer>
  release(offer: string, grab: string, user: string, more?: CommandOptions): Promise<Answer>
  extend(offer: string, grab: string, user: string, more?: CommandOptions): Promise<Answer>
  return(
    offer: string, grab: string, user: string, more?: ReturnFields & CommandOptions,
  ): Promise<Answer>
  redeem(
    offer: string, grab: string, user: string, order: string, more?: RedeemFields & CommandOptions,
  ): Promise<Answer>
  unredeem(offer: string, grab: string, user: string, order: string, more?: CommandOptions): Promise<Answer>

  offers(asked?: OffersAsked): Promise<OfferPage>
  offer(offer: string, asked?: AfterAsked): Promise<OfferDetail>
  offerGrabs(offer: string, asked?: OfferGrabsAsked): Promise<TakenPage>
  userBalances(user: string, asked?: PageAsked): Promise<BalancePage>
  userGrabs(user: string, asked?: UserGrabsAsked): Promise<UserGrabPage>
  userTransfers(user: string, asked?: PageAsked): Promise<TransferPage>

  /** Reconnects automatically, and resumes, until the loop ends or `signal` is aborted. */
  offerEvents(offer: string, options?: EventsOptions): AsyncGenerator<StreamedEvent, void, void>
  userEvents(user: string, options?: UserEventsOptions): AsyncGenerator<StreamedEvent, void, void>

  pages<P extends Page>(ask: (asked: any) => Promise<P>, asked?: object): AsyncGenerator<P, void, void>
}
