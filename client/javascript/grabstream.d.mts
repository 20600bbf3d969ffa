// Types of grabstream.mjs. Times are milliseconds since 1970 UTC; amounts count minor units or pieces.

export type Outcome =
  | 'granted' | 'held' | 'confirmed' | 'released' | 'returned' | 'opened' | 'amended' | 'closed' | 'paused'
  | 'resumed' | 'extended' | 'redeemed' | 'unredeemed' | 'loaded' | 'adjusted' | 'waiting'
  | 'invalid' | 'fenced' | 'busy' | 'conflict' | 'no_such_offer' | 'no_such_grab' | 'already_taken'
  | 'not_open_yet' | 'on_hold' | 'over' | 'not_eligible' | 'limit_reached' | 'sold_out' | 'not_enough_left'
  | 'expired' | 'not_held' | 'not_redeemable'

export interface LimitState {
  by: string
  per: 'offer' | 'week' | 'day' | 'hour'
  max: number
  left: number
  resets_at?: number
  scope?: 'offer' | 'campaign'
}

/** The answer to a command. `code` is the number of `outcome`; below 20 the command was carried out. */
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
  /** Of a refusal: what was refused, and until when. */
  message?: string
  deadline_at?: number
  due?: number
  currency?: string
  limit?: LimitState
  limits?: LimitState[]
  coupon_code?: string
  coupon_codes?: string[]
  /** Of a return: the codes of the units, which nobody may use any more. */
  voided_codes?: string[]
  metadata?: Record<string, string>
  /** Of a hold, where the gateway has payment keys: what the buyer takes to the payment side. */
  payment_token?: string
}

export interface Limit {
  by: string
  per: 'offer' | 'week' | 'day' | 'hour'
  max: number
  scope?: 'offer' | 'campaign'
}

interface CommonTerms {
  issuer: string
  title?: string
  total: number
  opens_at?: number
  closes_at?: number
  timezone?: string
  limits?: Limit[]
  audience?: 'everyone' | 'list' | 'ticket'
  retire_after_ms?: number
  [more: string]: unknown
}

export interface EnvelopeTerms extends CommonTerms {
  kind: 'envelope'
  funding: string
  asset: string
  parts: number
}

export interface PieceTerms extends CommonTerms {
  kind: 'coupon' | 'stock'
  max_per_grab?: number
  price?: number
  currency?: string
  hold_ms?: number
}

export type Terms = EnvelopeTerms | PieceTerms

/** `id`: the id of the command; a repeat with the same one gets the first answer. Absent: a new one. */
export interface CommandOptions {
  id?: string
}

export interface OperatorOptions extends CommandOptions {
  operator?: string
}

export interface GrabFields {
  quantity?: number
  attributes?: Record<string, string>
  ticket?: string
  wait?: boolean
  metadata?: Record<string, string>
}

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

export interface OffersAsked extends PageAsked {
  state?: 'open' | 'paused' | 'closed' | 'retired'
  kind?: 'envelope' | 'coupon' | 'stock'
  issuer?: string
  order?: 'newest' | 'random'
  visitor?: string
}

export interface Page {
  next?: string
}

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
  closes_at?: number
  closed_at?: number
  retired_at?: number
  reason?: string
}

export interface OfferDetail extends Offer {
  shard: number
  terms: Terms
  seed_sha256?: string
  seed?: string
}

type GrabState = 'held' | 'waiting' | 'confirmed' | 'granted' | 'released' | 'returned'

export interface Taken {
  place: number
  user: string
  grab: string
  state: GrabState
  quantity: number
  amount: number
  asset: string
  held: number
  taken: number
  redeemed: number
  at: number
}

export interface UserGrab extends Omit<Taken, 'user'> {
  offer: string
  /** On the waiting list; 1 is served next. Told where one offer is asked about. */
  position?: number
  back: number
  due?: number
  currency?: string
  paid: number
  refunded: number
  deadline_at?: number
  basket?: string
  metadata?: Record<string, string>
  payment_token?: string
  shard: number
  seq: number
}

/** Sums of any number of amounts: a bigint where a number would round it, from 2^53 on. */
export interface Balance {
  asset: string
  available: number | bigint
  held: number | bigint
}

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
  amend(offer: string, changes: Record<string, unknown>, options?: OperatorOptions): Promise<Answer>
  pause(offer: string, options?: OperatorOptions): Promise<Answer>
  resume(offer: string, options?: OperatorOptions): Promise<Answer>
  close(offer: string, options?: OperatorOptions): Promise<Answer>

  grab(offer: string, user: string, more?: GrabFields & CommandOptions): Promise<Answer>
  takeBasket(grabs: BasketGrab[], options?: CommandOptions): Promise<Answer[]>

  confirm(
    offer: string, grab: string, user: string,
    more?: {
      payment?: string; paid?: number; currency?: string; quantity?: number; receipt?: string
    } & CommandOptions,
  ): Promise<Answer>
  release(offer: string, grab: string, user: string, more?: CommandOptions): Promise<Answer>
  extend(offer: string, grab: string, user: string, more?: CommandOptions): Promise<Answer>
  return(
    offer: string, grab: string, user: string, more?: { quantity?: number; reason?: string } & CommandOptions,
  ): Promise<Answer>
  redeem(
    offer: string, grab: string, user: string, order: string, more?: { quantity?: number } & CommandOptions,
  ): Promise<Answer>
  unredeem(offer: string, grab: string, user: string, order: string, more?: CommandOptions): Promise<Answer>

  offers(asked?: OffersAsked): Promise<Page & { offers: Offer[] }>
  offer(offer: string, asked?: AfterAsked): Promise<OfferDetail>
  offerGrabs(offer: string, asked?: PageAsked & { order?: 'place' | 'luckiest' }): Promise<Page & { grabs: Taken[] }>
  userBalances(user: string, asked?: PageAsked): Promise<Page & { balances: Balance[] }>
  userGrabs(user: string, asked?: PageAsked): Promise<Page & { grabs: UserGrab[] }>
  userTransfers(user: string, asked?: PageAsked): Promise<Page & { transfers: UserTransfer[] }>

  /** Connects again by itself, and resumes, until the loop ends or `signal` is aborted. */
  offerEvents(offer: string, options?: EventsOptions): AsyncGenerator<StreamedEvent, void, void>
  userEvents(user: string, options?: UserEventsOptions): AsyncGenerator<StreamedEvent, void, void>

  pages<P extends Page>(ask: (asked: any) => Promise<P>, asked?: object): AsyncGenerator<P, void, void>
}
