-- Confirms holds that were paid, as most of them are: a confirmation is for all units of a hold, which has
-- not ended and gets no codes, and nothing is known under its id and its payment. The data of such
-- confirmations are read at once, before they are decided one after the other; their events, records and
-- answers are joined from texts that they share, and all records are written at once. This does what
-- `confirm` in commands/confirm.lua does for one of them; all other confirmations are left to it, in their
-- order.
--- @include "cost"
--- @include "packed_values"
--- @include "decide"
--- @include "repeats"
--- @include "offers"
--- @include "pieces"
--- @include "command"

-- Executes confirmations of one offer from the i-th on, and adds their packed rows to `rows`; returns the
-- index of the first that it left, because it is not plain or the call is spent. `act_alike` of carry_out;
-- commands/confirm.lua reads the columns.
local confirm_run
do
  -- Confirmations of an offer that are read at once, and bytes of the records of their grabs, which may be
  -- large: of a hold that was confirmed unit by unit.
  local AHEAD, AHEAD_BYTES = 16, 32768

  -- The values of a hash under the fields from one index to another, as a list from 1.
  local function read(key, fields, first, last)
    local values, bytes = redis.call('HMGET', key, unpack(fields, first, last)), 0
    for n = 1, #values do
      if values[n] then bytes = bytes + #values[n] end
    end
    spend(COST.read_ahead * #values + COST.read_byte * bytes)
    return values
  end

  -- The last of some grabs whose records have at most AHEAD_BYTES together; the one before the first, if that
  -- has more.
  local function last_in_bytes(key, names, first, last)
    local bytes = 0
    for i = first, last do
      bytes = bytes + redis.call('HSTRLEN', key, names[i])
      if bytes > AHEAD_BYTES then return i - 1 end
    end
    return last
  end

  -- Reads what is stored about the next confirmations of one offer: {offer, first, last; from 1: answers
  -- (whether there is one), refusals, payments, grabs}. The lists are empty where there is no such offer, or
  -- it does not confirm so, where nothing can be stored, and where the first grab has a large record.
  local function read_ahead(commands, first)
    local o, columns, last = commands.offer_of[first], commands.columns, first
    while last < first + AHEAD - 1 and commands.offer_of[last + 1] == o do last = last + 1 end
    local offer, ids, names = commands.offers[o], commands.ids, columns.grabs
    local ahead = {offer = offer, first = first, last = last, answers = {}, refusals = {}, payments = {},
      grabs = {}}
    commands.ahead = ahead
    if not offer or not offer.rules.hold_ms or offer.loads.codes then return ahead end
    local campaign, fields, grabs_key = offer.campaign, {}, KEYS[offer.base + KEY.grabs]
    last = last_in_bytes(grabs_key, names, first, last)
    ahead.last = math.max(first, last)
    if last < first then return ahead end
    ahead.answers = are_answered(campaign, {unpack(ids, first, last)})
    spend(COST.read_ahead * (last - first + 1))
    if commands.has_refusals == nil then commands.has_refusals = redis.call('EXISTS', KEYS[3]) == 1 end
    if commands.has_refusals then
      for i = first, last do fields[i] = refusal_field(campaign.name, ids[i]) end
      ahead.refusals = read(KEYS[3], fields, first, last)
    end
    if columns.payments then ahead.payments = read(campaign.payments_key, columns.payments, first, last) end
    ahead.grabs = read(grabs_key, names, first, last)
    return ahead
  end

  -- The record of a grab whose whole hold is confirmed is joined from bytes of the one before: packing all of
  -- it would cost as much as the rest of the confirmation.
  local unpack_held, pack_confirmed
  do
    -- The start of a packed grab, a list of 20 values; and its end if it has neither payments nor codes.
    local BEGIN_BYTES, NO_PAYMENTS, NO_CODES = 3, 144, 144

    -- Returns of a grab that holds all its units, and of which nothing was confirmed or returned before, the
    -- values that a confirmation needs: user, place, units, price, when the hold ends; and for
    -- pack_confirmed, the bytes before its quantity, and before its counters. nil for another grab.
    function unpack_held(record)
      local payments, codes = string.byte(record, -2, -1)
      if payments ~= NO_PAYMENTS or codes ~= NO_CODES then return nil end
      local from, user, place = cmsgpack.unpack_limit(record, 2, BEGIN_BYTES)
      local to, quantity, held, taken, _, _, deadline, grace, _, price, _, _, _, confirmed_seq, confirmed_at =
        cmsgpack.unpack_limit(record, 14, from)
      if held == 0 or held ~= quantity or taken > 0 or confirmed_seq > 0 or confirmed_at > 0 then
        return nil
      end
      return user, place, held, price, deadline + grace, from, to
    end

    -- Returns what pack_grab does of that grab when all that it held is taken. Packed are its units, the seq
    -- and time of its event, and its payment (nil: none). Zeros are packed as one byte each.
    function pack_confirmed(record, from, to, units, seq, at, payment)
      local who, counters = string.sub(record, 1, from), string.sub(record, to + 1, -3)
      local numbers = string.sub(record, from + 2 * #units + 2, to - 2)
      if not payment then
        return who .. units .. '\0' .. units .. numbers .. seq .. at .. counters .. '\144\144'
      end
      return who .. units .. '\0' .. units .. numbers .. seq .. at .. counters .. '\145\146' .. payment
        .. units .. '\144'
    end
  end

  -- The texts that confirmations of an offer share in a call while as many units are left.
  local function texts_of(call, offer)
    local pack = cmsgpack.pack
    return {
      left = offer.units_left,
      head = '{"type":"grab.confirmed","v":1,"shard":' .. call.shard .. ',"seq":',
      offer = string.format(',"offer":"%s","at":%d,"command":"', offer.name, call.now),
      units_left = string.format(',"left":%d,"held":0', int(offer.units_left)),
      issuer = ',"issuer":"' .. offer.issuer .. '","digest":"',
      at = pack(call.now),
      row_end = pack(offer.units_left, 0, 0) .. (offer.kind == 'coupon' and '\129' .. pack('number')
        or pack({})),
      payment_head = '\152' .. pack(offer.name),
      member = offer.name .. '/',
      answer_with = packer_of('answers', offer.name, CODE.confirmed, call.now),
      terms_by_price = {},
    }
  end

  -- Those that they share if they are for as many units at one price: `units`, and what follows `user` and
  -- `payment` in the event, `seq` in the row and in the record of the payment.
  local function terms_of(offer, texts, units, price)
    local terms_by_units = texts.terms_by_price[price] or {}
    texts.terms_by_price[price] = terms_by_units
    local terms = terms_by_units[units]
    if not terms then
      local paid, pack = int(price * units), cmsgpack.pack
      local currency = paid > 0 and offer.rules.currency or ''
      terms = {pack(units),
        string.format('","quantity":%d,"amount":%d,"asset":"%s","place":', int(units), units, offer.asset),
        paid > 0 and string.format('","paid":%d,"currency":"%s"', paid, currency) or '"',
        texts.at .. pack(units, units), texts.at .. pack(units, paid, currency)}
      terms_by_units[units] = terms
    end
    return unpack(terms)
  end

  local function shared_texts(call, offer)
    local texts = offer.confirmed_texts
    if not texts or texts.left ~= offer.units_left then
      texts = texts_of(call, offer)
      offer.confirmed_texts = texts
    end
    return texts
  end

  -- Confirms the holds read ahead, from one confirmation on; returns the index of the first that it left. All
  -- that the confirmations share is in locals: Lua takes as long for a field as for a step of the rest.
  local function confirm_ahead(call, commands, ahead, first, rows)
    local offer, columns, ids, digests = ahead.offer, commands.columns, commands.ids, commands.digests
    local campaign, format, now, pack = offer.campaign, string.format, call.now, cmsgpack.pack
    -- By confirmation, from the one that was read first; and what this call has done.
    local before, stored, answers, refusals, payments = ahead.first - 1, ahead.grabs, ahead.answers,
      ahead.refusals, ahead.payments
    local grabs, records, answered, paid_now = offer.grabs, offer.records, campaign.answers, campaign.payments
    local refused = next(commands.refusals) and commands.refusals
    -- By confirmation, as sent.
    local names, paying, users, sums = columns.grabs, columns.payments, columns.users, columns.paid
    local currencies, quantities, currency = columns.currencies, columns.quantities, offer.rules.currency
    -- What is written.
    end_run(call)
    local lines, made, grabs_made, paid_made, gone = call.lines, campaign.made, offer.grabs_made,
      campaign.payments_made, offer.holds_gone
    local line, pair, paid_pair, ended = #lines, #made, #paid_made, #gone
    local grab_pair = #grabs_made
    local seq, offer_seq, held, spent, i = call.seq, offer.offer_seq, offer.held, 0, first
    local next_seq_packed = packer_of('numbers', seq + 1, 1)
    local texts = shared_texts(call, offer)
    local head, about, left, issuer, at = texts.head, texts.offer, texts.units_left, texts.issuer, texts.at
    local row_end, payment_head, member, answer_with = texts.row_end, texts.payment_head, texts.member,
      texts.answer_with
    local is_coupon, last_units, last_price = offer.kind == 'coupon', nil, nil
    local units_packed, after_user, after_payment, after_seq, payment_end
    while i <= ahead.last and not (i > 1 and is_spent(spent)) do
      local id, name, n = ids[i], names[i], i - before
      local record, payment = stored[n], paying and paying[i] or ''
      if not record or answers[n] or refusals[n] or payments[n] or answered[id] or paid_now[payment]
        or grabs[name] or records[name] or refused and refused[refusal_field(campaign.name, id)] then
        break
      end
      local user, place, units, price, ends_at, from, to = unpack_held(record)
      if not user or now >= ends_at or users and users[i] ~= '' and users[i] ~= user then break end
      local paid, asked = sums[i], quantities and quantities[i] or 0
      if paid ~= price * units or paid > 0 and currencies[i] ~= currency then break end
      if asked ~= 0 and asked ~= units then break end

      if units ~= last_units or price ~= last_price then
        units_packed, after_user, after_payment, after_seq, payment_end = terms_of(offer, texts, units, price)
        last_units, last_price = units, price
      end
      local digest, seq_packed, place_packed = digests[i], next_seq_packed(), pack(place)
      seq, offer_seq, held = seq + 1, offer_seq + 1, held - units
      local text = head .. format('%d,"offer_seq":%d', seq, offer_seq) .. about .. id .. '","grab":"' .. name
        .. '","user":"' .. user .. after_user .. format('%d', place) .. left
        .. (payment ~= '' and ',"payment":"' .. payment .. after_payment or '') .. issuer .. digest .. '"}'
      if payment == '' then
        record = pack_confirmed(record, from, to, units_packed, seq_packed, at)
      else
        record = pack_confirmed(record, from, to, units_packed, seq_packed, at,
          packed_head(#payment) .. payment)
        local kept = payment_head .. packed_head(#name) .. name .. '\2' .. seq_packed .. payment_end
        paid_made[paid_pair + 1], paid_made[paid_pair + 2], paid_now[payment] = payment, kept, kept
        paid_pair = paid_pair + 2
      end
      local row = '\154\2' .. seq_packed .. after_seq .. place_packed .. row_end
        .. (is_coupon and place_packed or '')
      local answer = answer_with(seq, digest, row)
      lines[line + 1], gone[ended + 1], rows[i] = text, member .. name, row
      records[name], grabs_made[grab_pair + 1], grabs_made[grab_pair + 2] = record, name, record
      answered[id], made[pair + 1], made[pair + 2] = answer, id, answer
      line, ended, pair, grab_pair, i = line + 1, ended + 1, pair + 2, grab_pair + 2, i + 1
      spent = spent + COST.plain_payment + COST.line_byte * #text + COST.record_byte * #record
        + COST.answer_byte * #answer
    end
    spend(spent)
    offer.changed = offer.changed or i > first
    call.seq, offer.offer_seq, offer.held = seq, offer_seq, held
    return i
  end

  function confirm_run(call, commands, i, rows)
    local last = #commands.ids
    -- A single one would pay for texts that no other shares.
    if last == 1 then return i end
    repeat
      local ahead = commands.ahead
      if not ahead or i > ahead.last then
        if i > 1 and is_spent() then return i end
        ahead = read_ahead(commands, i)
      end
      if #ahead.grabs > 0 then i = confirm_ahead(call, commands, ahead, i, rows) end
    until i <= ahead.last or i > last
    return i
  end
end
