//! The task of one ring, which lives as long as the server: it runs the ring whenever it is told to.

use std::rc::Rc;

use gaur_block::Device;

use super::lane::{self, Lane};
use super::mailbox::Mailbox;
use super::order::{Order, Shape};
use super::station::Station;

/// Follows orders until it is told to end.
pub(super) async fn run<D: Device + 'static>(
    station: Rc<Station<D>>,
    index: u16,
    orders: Mailbox<Order>,
) {
    loop {
        match orders.take().await {
            Order::Start(setup) => {
                let lane = Lane::new(&station, index, *setup);
                let answer = lane::serve(&lane, &orders).await;
                answer.put(Some(lane.next()));
            }
            Order::Stop(answer) => answer.put(None),
            Order::End => return,
            other => attend(&station, other).await,
        }
    }
}

/// Orders that need no ring.
pub(super) async fn attend<D: Device>(station: &Station<D>, order: Order) {
    match order {
        Order::Shape(answer) => answer.put(Shape {
            size_bytes: station.device.size_bytes(),
            limits: station.device.limits(),
        }),
        #[cfg(feature = "vduse")]
        Order::Position(answer) => answer.put(None),
        Order::Flush(answer) => answer.put(station.flush().await),
        Order::Start(_) | Order::Stop(_) | Order::Bell(_) | Order::End => {}
    }
}
